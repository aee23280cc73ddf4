// The library's update and norm, compiled again with other cache hints. The benchmark compares them with the library's own
// kernels; nothing else uses them.
//
//     plain          the library's unchanged source
//     streaming      ld.global.cs, st.global.cs: lines are evicted from the caches first
//     no_allocate    ld.global.L1::no_allocate: loads do not allocate lines in L1

#include "optim/src/cuda/1_number.cu"
#include "optim/src/cuda/2_table.cu"

#define VARIANT(HINT)                                                      \
    KERNEL(variants_##HINT##_adam_f32, Plain, SAME, SAME)                  \
    KERNEL(variants_##HINT##_adam_bf16_remainder, Plain, HALVES, SAME)     \
    NORM(variants_##HINT##_norm_l2_bf16, 4, add_norm<BF16, L2>)

namespace plain {
#include "optim/src/cuda/3_tile.cu"
#include "bench/cases/src/gpu/variants/rule.h"
VARIANT(plain)
}  // namespace plain

// Below, another type replaces uint4 in 3_tile.cu; its copy constructor performs the load.

namespace streaming {
struct Hinted : uint4 {
    __device__ Hinted(const Hinted& from) : uint4(__ldcs((const uint4*)&from)) {}
};
__device__ inline void __stwb(Hinted* to, uint4 x) { __stcs((uint4*)to, x); }
#define uint4 Hinted
#include "optim/src/cuda/3_tile.cu"
#undef uint4
#include "bench/cases/src/gpu/variants/rule.h"
VARIANT(streaming)
}  // namespace streaming

namespace no_allocate {
__device__ inline uint4 load(const void* from) {
#ifdef SIMT
    return *(const uint4*)from;
#else
    uint4 x;
    asm("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
        : "l"(from));
    return x;
#endif
}
struct Hinted : uint4 {
    __device__ Hinted(const Hinted& from) : uint4(load(&from)) {}
};
__device__ inline void __stwb(Hinted* to, uint4 x) { ::__stwb((uint4*)to, x); }
#define uint4 Hinted
#include "optim/src/cuda/3_tile.cu"
#undef uint4
#include "bench/cases/src/gpu/variants/rule.h"
VARIANT(no_allocate)
}  // namespace no_allocate

// Advances the only row by one step.
extern "C" __global__ void variants_prepare(Row* rows, const Step* step) {
    if (threadIdx.x == 0 && count_row(*rows, step)) plain::adam_constants(*rows, times(step->lr, rows->lr_scale));
}

// The stand-in finds kernels by name.
using namespace plain;
using namespace streaming;
using namespace no_allocate;
