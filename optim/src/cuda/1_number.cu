// Numbers: what a kernel computes with, every operation rounded on its own, and how numbers narrower than that are kept.
// Bit for bit: number.rs, remainder.rs, stochastic.rs and tensor's narrow.rs.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// By intrinsics, so that no compiler contracts a product and a sum, or divides by multiplying.
__device__ inline float plus(float a, float b) { return __fadd_rn(a, b); }
__device__ inline float minus(float a, float b) { return __fsub_rn(a, b); }
__device__ inline float times(float a, float b) { return __fmul_rn(a, b); }
__device__ inline float over(float a, float b) { return __fdiv_rn(a, b); }
__device__ inline float root(float a) { return __fsqrt_rn(a); }
// a * b + c, rounded once.
__device__ inline float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }

__device__ inline double plus(double a, double b) { return __dadd_rn(a, b); }
__device__ inline double minus(double a, double b) { return __dsub_rn(a, b); }
__device__ inline double times(double a, double b) { return __dmul_rn(a, b); }
__device__ inline double over(double a, double b) { return __ddiv_rn(a, b); }
__device__ inline double root(double a) { return __dsqrt_rn(a); }
__device__ inline double fused(double a, double b, double c) { return __fma_rn(a, b, c); }

// base^n by repeated squaring.
__device__ inline double power(double base, u64 n) {
    double result = 1.0;
    for (double square = base; n > 0; n >>= 1, square = times(square, square))
        if (n & 1) result = times(result, square);
    return result;
}

// A constant in the type that is computed with, to nearest even.
__device__ inline void set(float& x, double value) { x = __double2float_rn(value); }
__device__ inline void set(double& x, double value) { x = value; }

__device__ inline u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }
__device__ inline bool is_nan(float x) { return magnitude(x) > 0x7F800000u; }

__device__ inline float from_bf16(u32 bits) { return __uint_as_float(bits << 16); }

// To nearest even; NaN stays NaN.
__device__ inline u32 to_bf16(float x) {
    u32 bits = __float_as_uint(x), odd = (bits >> 16) & 1;
    return is_nan(x) ? (bits >> 16) | 0x40 : (bits + 0x7FFF + odd) >> 16;
}

__device__ inline float from_f16(u32 bits) {
    u32 magnitude = (bits & 0x7FFF) << 13;
    // Read as f32, the exponent is 112 too small; the product makes good for it, also for subnormals.
    float scaled = times(__uint_as_float(magnitude), __uint_as_float((127u + 112u) << 23));
    u32 value = (bits & 0x7C00) == 0x7C00 ? magnitude | 0x7F800000u : __float_as_uint(scaled);
    return __uint_as_float(value | (bits & 0x8000) << 16);
}

// To nearest even; what is too large becomes infinite, NaN stays NaN.
__device__ inline u32 to_f16(float x) {
    u32 bits = __float_as_uint(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7FFFFFFFu;
    u32 odd = (magnitude >> 13) & 1;
    u32 normal = (magnitude - (112u << 23) + 0xFFF + odd) >> 13;
    // Below 2^-14 an addition to 0.5 rounds to multiples of 2^-24, the smallest subnormal.
    u32 subnormal = __float_as_uint(plus(__uint_as_float(magnitude), 0.5f)) - 0x3F000000u;
    u32 finite = magnitude < 113u << 23 ? subnormal : normal;
    u32 large = magnitude > 0x7F800000u ? 0x7E00 : 0x7C00;
    return sign | (magnitude > 0x477FEFFFu ? large : finite);
}

// An f32 master from its bf16 half and the 16 bits it is off by.
__device__ inline float join(u32 high, u32 remainder) {
    return __uint_as_float((high << 16) + (u32)(int)(short)remainder);
}

// The 16 bits that `x` is off from `high`, its bf16 half.
__device__ inline u32 remainder_of(float x, u32 high) {
    int off = (int)(__float_as_uint(x) - (high << 16));
    off = off > 0x7FFF ? 0x7FFF : off < -0x7FFF ? -0x7FFF : off;
    return (high & 0x7F80) == 0x7F80 ? 0 : (u32)off & 0xFFFF;
}

// Whether `round_at_random` has nothing to see to but random bits.
__device__ inline bool rounds_simply(u32 magnitude) { return magnitude < 0x7F7F0000u; }

// To bf16, up with probability (lower half) / 2^16; finite numbers stay finite.
__device__ inline u32 round_at_random(float x, u32 random) {
    u32 bits = __float_as_uint(x);
    u32 up = rounds_simply(bits & 0x7FFFFFFFu) ? random : 0;
    u32 rounded = (bits + up) >> 16;
    return is_nan(x) ? rounded | 0x40 : rounded;
}

// The same of two such numbers, with 16 random bits each, as a pair.
__device__ inline u32 round_simply_at_random(float low, float high, u32 random) {
    u32 a = __float_as_uint(low) + (random & 0xFFFF), b = __float_as_uint(high) + (random >> 16);
    return __byte_perm(a, b, 0x7632);
}

// Of two pairs of 16-bit floats the larger ones: NaN where there is one, or, of the second, only where both are. The stand-in has
// its own.
#ifndef SIMT
#define OF_PAIRS(NAME, WHICH)                                                \
    __device__ inline u32 NAME(u32 a, u32 b) {                               \
        u32 c;                                                               \
        asm(WHICH " %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));                \
        return c;                                                            \
    }
OF_PAIRS(larger_bf16s, "max.NaN.bf16x2")
OF_PAIRS(larger_numbers_bf16, "max.bf16x2")
OF_PAIRS(larger_f16s, "max.NaN.f16x2")
OF_PAIRS(larger_numbers_f16, "max.f16x2")

// A finite f16; `from_f16` also keeps the bits of NaN, and takes ten times as long.
__device__ inline float from_finite_f16(u32 bits) {
    float x;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.f32.f16 %0, low; }" : "=f"(x) : "r"(bits));
    return x;
}
#else
__device__ inline float from_finite_f16(u32 bits) { return from_f16(bits & 0xFFFF); }
#endif
