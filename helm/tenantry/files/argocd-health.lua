-- Health of Tenant, AdapterPool and Adapter for Argo CD: the contract of their conditions, the same for all three.
local health = {status = "Progressing", message = "the operator has not acted on this generation yet"}
if obj.metadata.deletionTimestamp ~= nil then
  health.message = "it is being deleted"
  return health
end
local status = obj.status
if status == nil or status.observedGeneration ~= obj.metadata.generation then
  return health
end
local found = {}
for _, condition in ipairs(status.conditions or {}) do
  found[condition.type] = condition
end
local function is(kind, value)
  return found[kind] ~= nil and found[kind].status == value
end
local function say(name, kind)
  local condition = found[kind]
  local message = condition.message
  if message == nil or message == "" then
    message = condition.reason
  end
  return {status = name, message = condition.reason .. ": " .. message}
end
if is("Stalled", "True") then
  return say("Degraded", "Stalled")
end
if is("Suspended", "True") then
  return say("Suspended", "Suspended")
end
if is("Reconciling", "True") then
  if found["Reconciling"].reason == "PausedByHand" then
    return say("Suspended", "Reconciling")
  end
  return say("Progressing", "Reconciling")
end
if is("Ready", "True") then
  return say("Healthy", "Ready")
end
if is("Ready", "False") then
  return say("Degraded", "Ready")
end
return health
