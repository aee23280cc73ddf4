// dst = src in another type, to nearest, ties to even. Reference: tensor's cast.rs.

template <u32 FROM, u32 TO>
struct Cast {
    typedef Vector<float, FROM> From;
    typedef Vector<float, TO> To;
    void* dst;
    const void* src;

    __device__ bool aligned(u64 start) const {
        u64 from = (u64)src + start * (FROM == SAME ? 4 : 2), to = (u64)dst + start * (TO == SAME ? 4 : 2);
        return (from | to) % 16 == 0;
    }

    __device__ void whole(u64 start) const {
        From s;
        To d;
        s.load(src, nullptr, start);
#pragma unroll
        for (int i = 0; i < OWNED<float>; i++) d.put(i, s.get(i));
        d.store(dst, nullptr, start);
    }

    __device__ void all(u64 len) const {
        const u64 tile = TILE<float>;
        for (u64 start = blockIdx.x * tile; start < len; start += gridDim.x * tile) {
            if (len - start >= tile && aligned(start)) {
                whole(start);
                continue;
            }
            u64 end = len - start < tile ? len : start + tile;
#pragma unroll 1
            for (u64 i = start + threadIdx.x; i < end; i += THREADS)
                To::write(dst, nullptr, i, From::read(src, nullptr, i));
        }
    }
};

#define CAST(NAME, FROM, TO)                              \
    extern "C" __global__ void __launch_bounds__(THREADS) \
        NAME(void* dst, const void* src, u64 len) {       \
        Cast<FROM, TO>{dst, src}.all(len);                \
    }

CAST(cast_f32_bf16, SAME, BF16)
CAST(cast_f32_f16, SAME, F16)
CAST(cast_bf16_f32, BF16, SAME)
CAST(cast_bf16_f16, BF16, F16)
CAST(cast_f16_f32, F16, SAME)
CAST(cast_f16_bf16, F16, BF16)
