// dst = weight * src, or dst = fma(weight, src, dst), of one type. Reference: ../accumulate.rs.
// In f32 an addition reads both and writes dst: 12 bytes an element.

enum How { COPY, SCALE, ADD };

template <typename T>
__device__ inline T accumulated(T d, T s, T weight, How how) {
    return how == ADD ? fused(weight, s, d) : times(weight, s);
}

template <typename T, u32 FORMAT>
struct Accumulate {
    typedef Vector<T, FORMAT> V;
    void* dst;
    const void* src;
    T weight;
    How how;

    __device__ static u64 size() { return FORMAT == SAME ? sizeof(T) : 2; }

    __device__ bool aligned(u64 start) const {
        return (((u64)dst + start * size()) | ((u64)src + start * size())) % 16 == 0;
    }

    __device__ void each(u64 start, u64 end) const {
#pragma unroll 1
        for (u64 i = start + threadIdx.x; i < end; i += THREADS) {
            T d = how == ADD ? V::read(dst, nullptr, i) : 0;
            T s = V::read(src, nullptr, i);
            V::write(dst, nullptr, i, how == COPY ? s : accumulated(d, s, weight, how));
        }
    }

    __device__ void whole(u64 start) const {
        V d, s, sum;
        s.load(src, nullptr, start);
        if (how == COPY) return s.store(dst, nullptr, start);
        if (how == ADD) d.load(dst, nullptr, start);
#pragma unroll
        for (int i = 0; i < OWNED<T>; i++) sum.put(i, accumulated(how == ADD ? d.get(i) : 0, s.get(i), weight, how));
        sum.store(dst, nullptr, start);
    }

    __device__ void all(u64 len) const {
        for (u64 start = blockIdx.x * (u64)TILE<T>; start < len; start += gridDim.x * (u64)TILE<T>) {
            if (len - start >= TILE<T> && aligned(start)) whole(start);
            else each(start, len - start < TILE<T> ? len : start + TILE<T>);
        }
    }
};

#define ACCUMULATE(NAME, T, FORMAT)                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                  \
        NAME(void* dst, const void* src, u64 len, double weight, u32 first) {              \
        Accumulate<T, FORMAT> pass{dst, src, 0, first ? weight == 1 ? COPY : SCALE : ADD}; \
        set(pass.weight, weight);                                                          \
        pass.all(len);                                                                     \
    }

ACCUMULATE(accumulate_f32, float, SAME)
ACCUMULATE(accumulate_f64, double, SAME)
ACCUMULATE(accumulate_bf16, float, BF16)
ACCUMULATE(accumulate_f16, float, F16)
