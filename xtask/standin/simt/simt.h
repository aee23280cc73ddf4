// A stand-in for a CUDA device: runs kernels on the CPU, one thread of a block at a time. It supports what Meshstep's
// kernels use: blocks of one dimension, static shared memory, barriers, shuffles, and arithmetic by intrinsics.
//
// A kernel's unmodified source is compiled after this file, by any C++17 compiler for a system with ucontext. scheduler.h
// runs the threads, in orders that simt_reverse, simt_shuffle and simt_interleave select.
//
//     c++ -std=c++17 -O1 -ffp-contract=off -fno-strict-aliasing -shared -fPIC unit.cpp -o libunit.so
//
// unit.cpp contains this file, the kernels, and SIMT_KERNEL(name) for each kernel; the library then exports `simt_launch`.
// With -fsanitize=alignment -fsanitize-undefined-trap-on-error, a misaligned access ends the program, as it ends a launch
// on a device. With -fsanitize=thread, without the sanitizer's library, other blocks may run at every load and store that
// the compiler emits.
#pragma once

#include "scheduler.h"

#define SIMT_CALL extern "C" __attribute__((visibility("default")))

// With SIMT defined, kernels omit their inline PTX and use the functions of this file.
#define SIMT
#define __device__
#define __global__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)

struct uint2 {
    unsigned x, y;
} __align__(8);
struct uint4 {
    unsigned x, y, z, w;
} __align__(16);
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }

namespace simt {

// Settings and results of a host thread. Fibers must not use them, because another host thread may resume a fiber.
inline thread_local bool reverse = false;
inline thread_local uint64_t seed = 0;
inline thread_local unsigned in_flight = 1;
inline thread_local unsigned first_block = 0, end_block = ~0u;
inline thread_local uint64_t wide_stores = 0;

// Registered kernels: they register by name when the library is loaded.
struct Kernel {
    const char* name;
    void (*call)(void**);
    const size_t* sizes;  // bytes of each parameter
    int parameters;
};

SIMT_STATE List<Kernel> kernels;

template <auto KERNEL, typename... Args, size_t... I>
void call_with(void (*)(Args...), void** args, std::index_sequence<I...>) {
    KERNEL(*(std::remove_reference_t<Args>*)args[I]...);
}

template <auto KERNEL, typename... Args>
std::index_sequence_for<Args...> indices_of(void (*)(Args...));

template <auto KERNEL>
void call(void** args) {
    call_with<KERNEL>(KERNEL, args, decltype(indices_of<KERNEL>(KERNEL)){});
}

// The trailing 0 keeps the array non-empty for kernels without parameters.
template <typename... Args>
constexpr size_t SIZES[sizeof...(Args) + 1] = {sizeof(Args)..., 0};

struct Register {
    template <typename... Args>
    Register(const char* name, void (*call)(void**), void (*)(Args...)) {
        kernels.push({name, call, SIZES<Args...>, (int)sizeof...(Args)});
    }
};

struct Guard {
    pthread_mutex_t* mutex;
    explicit Guard(pthread_mutex_t* mutex) : mutex(mutex) { pthread_mutex_lock(mutex); }
    ~Guard() { pthread_mutex_unlock(mutex); }
};

}  // namespace simt

#define SIMT_KERNEL(NAME) static simt::Register register_##NAME(#NAME, simt::call<NAME>, NAME);

#define threadIdx (simt::block->current->index)
#define blockIdx (simt::block->index)
#define blockDim (simt::grid.dim)
#define gridDim (simt::grid.grid)

static inline void __syncthreads() { simt::wait(simt::Waits::FOR_BLOCK); }
static inline void __syncwarp() { simt::wait(simt::Waits::FOR_WARP); }
static inline void __threadfence() { simt::point(simt::TELLING); }

// Supported for whole warps only.
static inline unsigned __shfl_xor_sync(unsigned mask, unsigned value, int lanes) {
    if (mask != 0xFFFFFFFFu) std::abort();
    simt::Thread* self = simt::block->current;
    self->given = value;
    simt::wait(simt::Waits::FOR_WARP);
    unsigned taken = simt::block->threads.items[self->index.x ^ (unsigned)lanes].given;
    // No thread offers a new value before all have read this one.
    simt::wait(simt::Waits::FOR_WARP);
    return taken;
}

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dsub_rn(double a, double b) { return a - b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
static inline double __ddiv_rn(double a, double b) { return a / b; }
static inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float __double2float_rn(double a) { return (float)a; }
static inline double __ull2double_rn(unsigned long long a) { return (double)a; }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }

template <typename To, typename From>
static inline To simt_bits(From from) {
    static_assert(sizeof(To) == sizeof(From), "the same bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
static inline float __uint_as_float(unsigned x) { return simt_bits<float>(x); }
static inline unsigned __float_as_uint(float x) { return simt_bits<unsigned>(x); }
static inline long long __double_as_longlong(double x) { return simt_bits<long long>(x); }
static inline double __longlong_as_double(long long x) { return simt_bits<double>(x); }
static inline double __hiloint2double(int high, int low) {
    return simt_bits<double>((uint64_t)(unsigned)high << 32 | (unsigned)low);
}

#define fabsf __builtin_fabsf

// Selects four of the eight bytes of `low` and `high`; each takes four bits of `which` as its index.
static inline unsigned __byte_perm(unsigned low, unsigned high, unsigned which) {
    uint64_t all = (uint64_t)high << 32 | low;
    unsigned bytes = 0;
    for (int i = 0; i < 4; i++) bytes |= (unsigned)(all >> (which >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    return bytes;
}

// Returns the larger halves of two pairs of 16-bit floats, with INFINITE as the bits of infinity: PTX's max.NaN, or its
// max.
template <unsigned INFINITE, bool NAN_WINS>
static inline unsigned simt_larger(unsigned a, unsigned b) {
    auto order = [](unsigned x) { return x & 0x8000 ? -(int)(x & 0x7FFF) : (int)x; };
    unsigned pair = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        unsigned x = a >> shift & 0xFFFF, y = b >> shift & 0xFFFF, larger = order(x) >= order(y) ? x : y;
        bool no_x = (x & 0x7FFF) > INFINITE, no_y = (y & 0x7FFF) > INFINITE;
        if (no_x || no_y) larger = NAN_WINS || (no_x && no_y) ? 0x7FFF : no_x ? y : x;
        pair |= larger << shift;
    }
    return pair;
}
static inline unsigned larger_bf16s(unsigned a, unsigned b) { return simt_larger<0x7F80, true>(a, b); }
static inline unsigned larger_numbers_bf16(unsigned a, unsigned b) { return simt_larger<0x7F80, false>(a, b); }
static inline unsigned larger_f16s(unsigned a, unsigned b) { return simt_larger<0x7C00, true>(a, b); }
static inline unsigned larger_numbers_f16(unsigned a, unsigned b) { return simt_larger<0x7C00, false>(a, b); }

// As on a device, an access must be aligned.
template <typename T>
static inline T __ldg(const T* from) {
    if ((uintptr_t)from % sizeof(T)) std::abort();
    T value = *from;
    simt::point();
    return value;
}

// As on a device, an access of 16 bytes must be aligned.
static inline void __stwb(uint4* to, uint4 value) {
    if ((uintptr_t)to % 16) std::abort();
    simt::point();
    simt::wide_stores++;
    *to = value;
}

// Cache hints do not change values.
static inline uint4 __ldcs(const uint4* from) { return __ldg(from); }

static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}

// Supported for whole warps only.
static inline int __any_sync(unsigned mask, int predicate) {
    if (mask != 0xFFFFFFFFu) std::abort();
    simt::Thread* self = simt::block->current;
    self->given = predicate != 0;
    simt::wait(simt::Waits::FOR_WARP);
    unsigned any = 0, first = self->index.x / simt::WARP * simt::WARP;
    for (unsigned i = first; i < first + simt::WARP; i++) any |= simt::block->threads.items[i].given;
    simt::wait(simt::Waits::FOR_WARP);
    return (int)any;
}

// Atomic, because threads run one at a time and cannot be preempted between the load and the store.
enum class SimtAtomic { ADD, MAX };
template <SimtAtomic KIND, typename T>
__attribute__((no_sanitize("thread"))) static inline T simt_update(T* at, T x) {
    simt::point(simt::TELLING);
    T before = *at;
    *at = KIND == SimtAtomic::ADD ? before + x : before > x ? before : x;
    simt::point(simt::TELLING);
    return before;
}
static inline unsigned atomicAdd(unsigned* at, unsigned x) { return simt_update<SimtAtomic::ADD>(at, x); }
static inline unsigned long long atomicAdd(unsigned long long* at, unsigned long long x) {
    return simt_update<SimtAtomic::ADD>(at, x);
}
static inline unsigned long long atomicMax(unsigned long long* at, unsigned long long x) {
    return simt_update<SimtAtomic::MAX>(at, x);
}

// Non-atomic versions of these operations, in which other threads run between load and store. For tests that remove an
// atomic.
template <typename T>
static inline T simt_torn_add(T* at, T x) {
    T before = *at;
    simt::pause();
    *at = before + x;
    return before;
}
template <typename T>
static inline T simt_torn_max(T* at, T x) {
    T before = *at;
    simt::pause();
    *at = before > x ? before : x;
    return before;
}

// Runs a kernel to its end; `args` has a pointer to each argument, as in cuLaunchKernel. Returns null, or an error text.
SIMT_CALL const char* simt_launch(const char* name, unsigned grid, unsigned threads, void** args) {
    SIMT_STATE pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER;
    simt::Guard guard(&one_at_a_time);
    for (unsigned k = 0; k < simt::kernels.count; k++) {
        const simt::Kernel& kernel = simt::kernels.items[k];
        if (std::strcmp(kernel.name, name) != 0) continue;
        simt::grid.dim = {threads, 1, 1};
        simt::grid.grid = {grid, 1, 1};
        simt::grid.reverse = simt::seed ? simt::seed & 1 : simt::reverse;
        simt::grid.call = kernel.call;
        simt::grid.args = args;
        simt::draw_blocks(simt::first_block, simt::end_block < grid ? simt::end_block : grid, simt::seed);
        return simt::run_grid(simt::in_flight);
    }
    return "there is no such kernel";
}

// The following settings apply to launches of the calling thread only.

// Sets whether blocks, and threads of a block, run in reverse order from now on.
SIMT_CALL void simt_reverse(int reverse) { simt::reverse = reverse != 0; }

// Draws the order of blocks, and whether threads run in reverse order, from the seed from now on; 0 ends this.
SIMT_CALL void simt_shuffle(uint64_t seed) { simt::seed = seed; }

// Keeps this number of blocks in flight from now on, at most 8; the seed selects their turns. 1 ends this.
SIMT_CALL void simt_interleave(unsigned in_flight) { simt::in_flight = in_flight; }

// Runs only the blocks `from..to` of every grid from now on, to test parts of a grid that is too large to run.
SIMT_CALL void simt_blocks(unsigned from, unsigned to) { simt::first_block = from, simt::end_block = to; }

// Returns the number of 16-byte stores so far.
SIMT_CALL uint64_t simt_wide_stores() { return simt::wide_stores; }

// Returns the name of kernel `i`; null after the last kernel.
SIMT_CALL const char* simt_kernel(unsigned i) {
    return i < simt::kernels.count ? simt::kernels.items[i].name : nullptr;
}

// Returns the number of a kernel's parameters and the bytes of each; -1 if the kernel is unknown or has more than `most`.
SIMT_CALL int simt_parameters(const char* name, size_t* sizes, int most) {
    for (unsigned k = 0; k < simt::kernels.count; k++) {
        const simt::Kernel& kernel = simt::kernels.items[k];
        if (std::strcmp(kernel.name, name) != 0) continue;
        if (kernel.parameters > most) return -1;
        for (int i = 0; i < kernel.parameters; i++) sizes[i] = kernel.sizes[i];
        return kernel.parameters;
    }
    return -1;
}

#ifdef __SANITIZE_THREAD__
// Functions that the compiler's instrumentation calls at each load and store.
#define SIMT_ACCESS(NAME) \
    extern "C" __attribute__((no_sanitize("thread"))) void __tsan_##NAME(void*) { \
        if (simt::in_kernel) simt::point(); \
    }
#define SIMT_ACCESSES(BYTES) SIMT_ACCESS(read##BYTES) SIMT_ACCESS(write##BYTES)
SIMT_ACCESSES(1) SIMT_ACCESSES(2) SIMT_ACCESSES(4) SIMT_ACCESSES(8) SIMT_ACCESSES(16)
SIMT_ACCESSES(_range)
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}
#endif
