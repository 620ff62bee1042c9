// Waiting for other threads that are about to be done. Always inlined: files of any instruction set may use it, and none
// leaves a copy for the linker.
#pragma once

#include <sched.h>

#define TENANTRY_INLINE inline __attribute__((always_inline))

namespace tenantry {

TENANTRY_INLINE void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Until ready(); lets others run when that takes long.
template <typename Ready>
TENANTRY_INLINE void spin_until(const Ready& ready) {
  for (int spins = 0; !ready(); ++spins) {
    if (spins < 2000) pause();
    else sched_yield();
  }
}

}  // namespace tenantry
