// The mean of several copies of a vector merged into one of them, element by element in f64, rounded once.
// Reference: cpu.rs. Letters: x an element of this copy, m of the mean, a of the anchor, s of what this copy sent.
// Bandwidth-bound and seldom, so one element a thread at a time, and formats are looked at there.

// The types of elements, as mod.rs numbers them.
enum MergeFormat : u32 { MERGE_F32, MERGE_F64, MERGE_BF16, MERGE_F16 };

// The vectors of one launch, and what is done to them. The same memory layout: gpu.rs.
struct Merge {
    void* values;        // x
    void* mean;          // m, or m - a; `merge_pack` writes it
    void* anchor;        // null: none
    const void* sent;    // null: nothing was sent earlier
    double* params;      // an outer optimizer's, from the anchor
    double* grads;       // and its gradients
    double alpha;        // the share of the result in x
    double share;        // the same of m - s
    u64 len;
    u32 own;             // format of x, a and s
    u32 wire;            // format of m
    u32 differences;     // not 0: m counts from a
    u32 squares;         // not 0: what m - s makes of x is at least 0
};

__device__ inline double merge_read(const void* from, u32 format, u64 i) {
    if (format == MERGE_F32) return ((const float*)from)[i];
    if (format == MERGE_F64) return ((const double*)from)[i];
    u32 bits = ((const u16*)from)[i];
    return format == MERGE_BF16 ? from_bf16(bits) : from_f16(bits);
}

// The f32 next to x towards zero, its last bit set where that is not exact: rounding it to 16 bits then rounds x once.
__device__ inline float round_to_odd(double x) {
    float near;
    set(near, x);
    if ((double)near == x || is_nan(near)) return near;
    double size = x < 0 ? -x : x, rounded = near < 0 ? -(double)near : (double)near;
    return __uint_as_float((__float_as_uint(near) - (rounded > size ? 1 : 0)) | 1);
}

__device__ inline void merge_write(void* to, u32 format, u64 i, double value) {
    float narrow;
    set(narrow, value);
    if (format == MERGE_F32) ((float*)to)[i] = narrow;
    else if (format == MERGE_F64) ((double*)to)[i] = value;
    else if (format == MERGE_BF16) ((u16*)to)[i] = (u16)to_bf16(round_to_odd(value));
    else ((u16*)to)[i] = (u16)to_f16(round_to_odd(value));
}

__device__ inline double merge_anchor(const Merge& at, u64 i) {
    return at.anchor ? merge_read(at.anchor, at.own, i) : 0;
}

__device__ inline double merge_mean_of(const Merge& at, double a, u64 i) {
    double m = merge_read(at.mean, at.wire, i);
    return at.differences ? plus(m, a) : m;
}

__device__ inline double mixed(double alpha, double x, double result) {
    return alpha == 1 ? result : plus(x, times(alpha, minus(result, x)));
}

// What is left of x, and the anchor of the next exchange.
__device__ inline void merge_keep(const Merge& at, u64 i, double x, double m) {
    merge_write(at.values, at.own, i, x);
    if (at.anchor) merge_write(at.anchor, at.own, i, m);
}

struct Pack {
    __device__ static void one(const Merge& at, u64 i) {
        double x = merge_read(at.values, at.own, i);
        merge_write(at.mean, at.wire, i, at.anchor ? minus(x, merge_anchor(at, i)) : x);
    }
};

struct Mean {
    __device__ static void one(const Merge& at, u64 i) {
        double m = merge_mean_of(at, merge_anchor(at, i), i), x = merge_read(at.values, at.own, i);
        if (at.sent) {
            x = plus(x, times(at.share, minus(m, merge_read(at.sent, at.own, i))));
            if (at.squares && x < 0) x = 0;
        } else {
            x = mixed(at.alpha, x, m);
        }
        merge_keep(at, i, x, m);
    }
};

// An outer optimizer begins at the anchor, and its gradient is what the mean has moved from there.
struct Begin {
    __device__ static void one(const Merge& at, u64 i) {
        double a = merge_anchor(at, i);
        at.params[i] = a;
        at.grads[i] = minus(a, merge_mean_of(at, a, i));
    }
};

struct Outer {
    __device__ static void one(const Merge& at, u64 i) {
        double a = merge_anchor(at, i), m = merge_mean_of(at, a, i);
        m = plus(m, minus(at.params[i], minus(a, at.grads[i])));
        merge_keep(at, i, mixed(at.alpha, merge_read(at.values, at.own, i), m), m);
    }
};

struct Zeros {
    __device__ static void one(const Merge& at, u64 i) {
        merge_write(at.values, at.own, i, mixed(at.alpha, merge_read(at.values, at.own, i), 0));
    }
};

#define MERGE(NAME, WHAT)                                                              \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const Merge at) {       \
        u64 step = gridDim.x * (u64)THREADS;                                           \
        for (u64 i = blockIdx.x * (u64)THREADS + threadIdx.x; i < at.len; i += step) { \
            WHAT::one(at, i);                                                          \
        }                                                                              \
    }

MERGE(merge_pack, Pack)
MERGE(merge_mean, Mean)
MERGE(merge_begin, Begin)
MERGE(merge_outer, Outer)
MERGE(merge_zeros, Zeros)
