// AdamW in f32 with bulk copies as loads, into a ring of stages in shared memory: many bytes are in flight without
// registers that wait for them. For one segment that begins at element 0.

#include "optim/src/cuda/1_number.cu"
#include "optim/src/cuda/2_table.cu"
#include "optim/src/cuda/3_tile.cu"
#include "bench/cases/src/gpu/variants/rule.h"

// A barrier in shared memory. A phase of it ends when one thread has announced the expected bytes and they have arrived.
// The stand-in has its own version.
#ifndef SIMT
__device__ inline u32 shared_address(const void* x) { return (u32)__cvta_generic_to_shared(x); }

__device__ inline void barrier_begin(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ inline void barrier_expect(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}

// Waits for the end of the phase with this parity; phases alternate between even and odd.
__device__ inline void barrier_wait(u64* barrier, u32 parity) {
    u32 done;
    do asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                    : "=r"(done)
                    : "r"(shared_address(barrier)), "r"(parity)
                    : "memory");
    while (!done);
}

__device__ inline void bulk_load(void* to, const void* from, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
#endif

template <u32 WIDTH, u32 STAGES>
__device__ inline void ring_sweep(const Streams& s, const Row& row, const Step* step) {
    constexpr u32 VECTORS = 4, TILE = 4 * WIDTH, BYTES = TILE * sizeof(float);
    __shared__ __align__(16) float ring[STAGES][VECTORS][TILE];
    __shared__ u64 full[STAGES];
    if (step->skip) return;
    const float* from[VECTORS] = {
        (const float*)s.grads, (const float*)s.params, (const float*)s.state[0], (const float*)s.state[1]};
    u64 tiles = row.end / TILE;
    // Called by the first thread.
    auto fill = [&](u64 tile, u32 stage) {
        if (tile >= tiles) return;
        barrier_expect(full + stage, VECTORS * BYTES);
#pragma unroll
        for (u32 v = 0; v < VECTORS; v++) bulk_load(ring[stage][v], from[v] + tile * TILE, BYTES, full + stage);
    };
    if (threadIdx.x == 0) {
        for (u32 stage = 0; stage < STAGES; stage++) barrier_begin(full + stage);
        for (u32 stage = 0; stage < STAGES; stage++) fill(blockIdx.x + (u64)stage * gridDim.x, stage);
    }
    __syncthreads();
    Plain rule;
    rule.set_from(row, *step);
    u32 stage = 0, parity = 0;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        barrier_wait(full + stage, parity);
        u32 w[VECTORS][4];
#pragma unroll
        for (u32 v = 0; v < VECTORS; v++) load_16_bytes(w[v], ring[stage][v] + 4 * threadIdx.x);
        // All threads have read the stage.
        __syncthreads();
        if (threadIdx.x == 0) fill(tile + (u64)STAGES * gridDim.x, stage);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float p = __uint_as_float(w[1][i]), x[2] = {__uint_as_float(w[2][i]), __uint_as_float(w[3][i])};
            rule.update(p, __uint_as_float(w[0][i]), x);
            w[1][i] = __float_as_uint(p), w[2][i] = __float_as_uint(x[0]), w[3][i] = __float_as_uint(x[1]);
        }
        u64 at = tile * TILE + 4 * threadIdx.x;
#pragma unroll
        for (u32 v = 1; v < VECTORS; v++) store_16_bytes(w[v], (float*)from[v] + at);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    // The elements after the last whole tile.
    for (u64 i = tiles * TILE + (u64)blockIdx.x * WIDTH + threadIdx.x; i < row.end; i += (u64)gridDim.x * WIDTH) {
        float *p = (float*)s.params + i, *m = (float*)s.state[0] + i, *v = (float*)s.state[1] + i, x[2] = {*m, *v};
        rule.update(*p, from[0][i], x);
        *m = x[0], *v = x[1];
    }
}

// The ring has 32 KiB of shared memory per block.
#define RING(NAME, WIDTH, STAGES)                                                                  \
    extern "C" __global__ void __launch_bounds__(WIDTH)                                            \
        NAME(const Streams s, const Row* rows, u64 count, u64 tiles, const Step* step) {           \
        ring_sweep<WIDTH, STAGES>(s, *rows, step);                                                 \
    }
RING(bulk_2_stages_adam_f32, 256, 2)
RING(bulk_4_stages_adam_f32, 128, 4)
