// Norms, exactly: sums of squares or magnitudes in words, the largest magnitude, and how many elements are not finite. Added to
// what is there, the same words as NormAccumulator's in any order and any grid, once they are carried.
//
// Reads each element once, 16 bytes at a time, and writes nothing but the few words.

struct Sums {
    u64* non_finite;
    u64* words;     // WORDS of them; the infinity norm has none
    u64* max_bits;  // of the largest finite magnitude, as a double
};

// Elements that are not finite are counted, and zero from now on.
template <typename T, u32 N>
__device__ inline u32 drop_non_finite(T (&x)[N]) {
    u32 count = 0;
    for (u32 i = 0; i < N; i++) {
        bool finite = is_finite(magnitude(x[i]));
        count += !finite;
        x[i] = finite ? x[i] : 0;
    }
    return count;
}

__device__ inline u64 as_double(u32 magnitude) { return (u64)__double_as_longlong((double)__uint_as_float(magnitude)); }
__device__ inline u64 as_double(u64 magnitude) { return magnitude; }

template <typename T, u32 FORMAT, Norm NORM>
__device__ inline void add_norm(const void* values, const Span* spans, u64 count, u64 tiles, const Sums& sums) {
    typedef Part<T, FORMAT> Part;
    __shared__ u64 words[WORDS];
    clear(words, WORDS);
    Dot<T> dot;
    dot.begin();
    typename Kind<T>::Bits peak = 0;
    u64 span = 0, non_finite = 0;
    u32 waiting = 0;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        span = find(spans, span, count, tile);
        u64 start = spans[span].start + (tile - spans[span].tile) * Part::TILE;
        T x[Part::N];
        Part::load(x, values, start, spans[span].end);
        Extent<T> extent(x);
        if (extent.high == BEYOND) {
            non_finite += drop_non_finite(x);
            extent = Extent<T>(x);
        }
        peak = extent.peak > peak ? extent.peak : peak;
        if constexpr (NORM == L2) {
            dot.add(x, x, extent, extent, words);
        } else if constexpr (NORM == L1) {
            T sign[Part::N];
            for (u32 i = 0; i < Part::N; i++) sign[i] = x[i] < 0 ? -1 : 1;
            dot.add(x, sign, extent, Extent<T>(sign), words);
        }
        if (++waiting == DRAIN_AFTER) drain(words, WORDS, sums.words), waiting = 0;
    }
    u64 max_bits = max_of_warp(as_double(peak));
    non_finite = sum_of_warp(non_finite);
    if (threadIdx.x % 32 == 0) {
        if (max_bits) atomicMax(sums.max_bits, max_bits);
        if (non_finite) atomicAdd(sums.non_finite, non_finite);
    }
    if (NORM == INF) return;
    dot.flush(words);
    drain(words, WORDS, sums.words);
}

#define NORM(NAME, T, FORMAT, WHICH)                                                          \
    extern "C" __global__ void __launch_bounds__(THREADS)                                     \
        NAME(const void* values, const Span* spans, u64 count, u64 tiles, const Sums sums) {  \
        add_norm<T, FORMAT, WHICH>(values, spans, count, tiles, sums);                        \
    }
#define NORMS(NAME, T, FORMAT)         \
    NORM(norm_l1_##NAME, T, FORMAT, L1) \
    NORM(norm_l2_##NAME, T, FORMAT, L2) \
    NORM(norm_inf_##NAME, T, FORMAT, INF)

NORMS(f32, float, SAME)
NORMS(f64, double, SAME)
NORMS(bf16, float, BF16)
NORMS(f16, float, F16)

// Carries sums, so that equal ones have equal words. A block takes a sum at a time.
extern "C" __global__ void __launch_bounds__(THREADS) norm_carry(u64* sums, u64 count) {
    __shared__ u64 words[WORDS];
    for (u64 i = blockIdx.x; i < count; i += gridDim.x) {
        if (threadIdx.x < WORDS) words[threadIdx.x] = sums[i * WORDS + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0) carry(words);
        __syncthreads();
        if (threadIdx.x < WORDS) sums[i * WORDS + threadIdx.x] = words[threadIdx.x];
        __syncthreads();
    }
}
