module tenantry.dev/e2e/cluster/source-controller

go 1.26.0

tool github.com/fluxcd/source-controller

require github.com/fluxcd/source-controller v1.8.5

replace github.com/opencontainers/go-digest => github.com/opencontainers/go-digest v1.0.1-0.20220411205349-bde1400a84be

replace github.com/fluxcd/pkg/artifact => github.com/fluxcd/pkg/artifact v0.8.0
