// Adam and the norms without their kernels; include it after 3_tile.cu. It may be included again in another namespace.
#undef PREPARE
#undef KERNELS
#undef KERNELS_BF16_STATE
#include "optim/src/cuda/4_random.cu"
#include "optim/src/cuda/5_vector.cu"
#include "optim/src/cuda/6_pass.cu"
#include "optim/src/cuda/8_exact.cu"
#include "optim/src/cuda/9_dot.cu"
#undef PREPARE
#undef KERNELS
#undef KERNELS_BF16_STATE
#define PREPARE(...)
#define KERNELS(...)
#define KERNELS_BF16_STATE(...)
#include "optim/src/rules/adam/adam.cu"
#define WITHOUT_KERNELS
#include "optim/src/norm/norm.cu"
