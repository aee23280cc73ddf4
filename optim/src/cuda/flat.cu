// Flat vectors, element by element: scaled, added with a weight, cast. Reference: accumulate.rs, and tensor's cast.rs.
// Bandwidth-bound; each element is read once and written once.

// dst[i] = op(src[i], dst[i]), in T. `src` and `dst` may be the same vector, if they have one format.
template <typename T, u32 FROM, u32 TO, typename Op>
__device__ inline void map(void* dst, const void* src, u64 n, const Op op) {
    typedef Vector<T, FROM> From;
    typedef Vector<T, TO> To;
    constexpr int N = OWNED<T>;
    // Tiles keep the alignment that the vectors begin with.
    bool aligned = ((u64)dst | (u64)src) % 16 == 0;
    for (u64 start = blockIdx.x * (u64)TILE<T>; start < n; start += gridDim.x * (u64)TILE<T>) {
        u64 end = n - start < TILE<T> ? n : start + TILE<T>;
        if (aligned && end - start == TILE<T>) {
            From from;
            To to;
            from.load(src, nullptr, start);
            if (Op::READS) to.load(dst, nullptr, start);
            T result[N];
#pragma unroll
            for (int i = 0; i < N; i++) result[i] = op(from.get(i), Op::READS ? to.get(i) : (T)0);
#pragma unroll
            for (int i = 0; i < N; i++) to.put(i, result[i]);
            to.store(dst, nullptr, start);
        } else {
            for (u64 i = start + threadIdx.x; i < end; i += THREADS) {
                T before = Op::READS ? To::read(dst, nullptr, i) : (T)0;
                To::write(dst, nullptr, i, op(From::read(src, nullptr, i), before));
            }
        }
    }
}

template <typename T>
struct Scale {
    static constexpr bool READS = false;
    T weight;
    __device__ T operator()(T x, T) const { return times(weight, x); }
};

template <typename T>
struct Add {
    static constexpr bool READS = true;
    T weight;
    __device__ T operator()(T x, T sum) const { return fused(weight, x, sum); }
};

template <typename T>
struct Same {
    static constexpr bool READS = false;
    __device__ T operator()(T x, T) const { return x; }
};

// The weight comes in f64 and is rounded to T.
#define FLAT(NAME, OP, T, FORMAT)                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        flat_##NAME(void* dst, const void* src, u64 n, double weight) {                            \
        OP<T> op;                                                                                  \
        set(op.weight, weight);                                                                    \
        map<T, FORMAT, FORMAT>(dst, src, n, op);                                                   \
    }

FLAT(scale_f32, Scale, float, SAME)
FLAT(scale_f64, Scale, double, SAME)
FLAT(scale_bf16, Scale, float, BF16)
FLAT(scale_f16, Scale, float, F16)
FLAT(add_f32, Add, float, SAME)
FLAT(add_f64, Add, double, SAME)
FLAT(add_bf16, Add, float, BF16)
FLAT(add_f16, Add, float, F16)

#define CAST(NAME, FROM, TO)                                                                       \
    extern "C" __global__ void __launch_bounds__(THREADS)                                          \
        flat_cast_##NAME(void* dst, const void* src, u64 n) {                                      \
        map<float, FROM, TO>(dst, src, n, Same<float>{});                                          \
    }

CAST(f32_to_bf16, SAME, BF16)
CAST(f32_to_f16, SAME, F16)
CAST(bf16_to_f32, BF16, SAME)
CAST(f16_to_f32, F16, SAME)
CAST(bf16_to_f16, BF16, F16)
CAST(f16_to_bf16, F16, BF16)
