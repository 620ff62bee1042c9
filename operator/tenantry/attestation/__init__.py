"""Proof of what a node runs before an engine starts there: tokens, the verifier that signs them, the gate in the pod.

The gate (`gate`) stands in the engine's pod and asks the questions; the operator carries them to a verifier
(`verifier`) and the answer back, since the pod reaches nothing. Both judge the answer by the same rules (`token`).
The operator signs the engine's certificate (`authority`) in the same exchange.
"""
