module tenantry.dev/e2e/cluster/kustomize-controller

go 1.26.0

tool github.com/fluxcd/kustomize-controller

require github.com/fluxcd/kustomize-controller v1.7.3

replace github.com/opencontainers/go-digest => github.com/opencontainers/go-digest v1.0.1-0.20220411205349-bde1400a84be
