// Sums without rounding: fixed point in words of 32 bits, 64 in the last, kept in 64 so that carries may wait. Adding integers
// in any order gives the same ones. Bit for bit: norm/exact.rs.

enum Norm : u32 { L1, L2, INF };

constexpr int WORDS = 133;
// The weight of bit 0 is 2^LOWEST: the square of the smallest double.
constexpr int LOWEST = -2148;

// Adds to a word in shared memory, in two halves: shared memory adds 32 bits by itself, 64 only in a loop.
__device__ inline void add_to(u64* word, u64 x) {
    u32 *low = (u32*)word, *high = low + 1, part = (u32)x;
    u32 before = atomicAdd(low, part);
    u32 rest = (u32)(x >> 32) + (before + part < part);
    if (rest) atomicAdd(high, rest);
}

// Adds `significand * 2^exponent` to words in shared memory, for LOWEST <= exponent <= 2006.
__device__ inline void deposit(u64* words, bool negative, u64 significand, int exponent) {
    u32 place = (u32)(exponent - LOWEST), shift = place % 32;
    u64 low = significand << shift;
    // 64 bits shifted by at most 31 reach into three words.
    u64 parts[3] = {(u32)low, low >> 32, shift ? significand >> (64 - shift) : 0};
#pragma unroll
    for (int i = 0; i < 3; i++)
        if (parts[i]) add_to(words + place / 32 + i, negative ? -parts[i] : parts[i]);
}

__device__ inline void deposit(u64* words, long long integer, int exponent) {
    bool negative = integer < 0;
    deposit(words, negative, negative ? -(u64)integer : (u64)integer, exponent);
}

// |x| = significand * 2^exponent, of a finite x.
struct Parts {
    u64 significand;
    int exponent;

    __device__ explicit Parts(double x) {
        u64 bits = (u64)__double_as_longlong(x), fraction = bits & (1ull << 52) - 1;
        int biased = (int)(bits >> 52 & 0x7FF);
        significand = biased ? fraction | 1ull << 52 : fraction;
        exponent = biased ? biased - 1075 : -1074;
    }
};

// Adds `x * y`, both finite, to words in shared memory: the definition.
__device__ inline void deposit_product(u64* words, double x, double y) {
    Parts a(x), b(y);
    bool negative = (x < 0) != (y < 0);
    int exponent = a.exponent + b.exponent;
    deposit(words, negative, a.significand * b.significand, exponent);
    deposit(words, negative, __umul64hi(a.significand, b.significand), exponent + 64);
}

__device__ inline void clear(u64* words, u32 count) {
    for (u32 i = threadIdx.x; i < count; i += THREADS) words[i] = 0;
    __syncthreads();
}

// Adds a block's words, of whole sums, to the device's, and clears them. What exceeds 32 bits goes one word up on the way: a
// word brings less than 2^33 however many terms the block had, so that 2^29 of these additions fit.
__device__ inline void drain(u64* words, u32 count, u64* to) {
    __syncthreads();
    for (u32 i = threadIdx.x; i < count; i += THREADS) {
        u32 place = i % WORDS;
        u64 kept = place == WORDS - 1 ? words[i] : (u32)words[i];
        u64 risen = place == 0 ? 0 : (u64)((long long)words[i - 1] >> 32);
        if (kept + risen) atomicAdd(to + i, kept + risen);
    }
    __syncthreads();
    clear(words, count);
}

// Moves what exceeds 32 bits up, word by word; the last keeps the sign. One thread.
__device__ inline void carry(u64* words) {
    long long carried = 0;
    for (int i = 0; i < WORDS - 1; i++) {
        long long full = (long long)words[i] + carried;
        words[i] = (u32)full;
        carried = full >> 32;
    }
    words[WORDS - 1] += (u64)carried;
}

// The 64 bits of a carried sum from the highest set one down, which are `bits * 2^exponent`; the last bit also stands for all
// below. None of zero. The sum is not negative.
struct Top {
    u64 bits;
    int exponent;

    __device__ explicit Top(const u64* words) {
        // Only the last word has a second digit.
        auto digit = [&](int i) -> u32 {
            return i < 0 ? 0 : i < WORDS ? (u32)words[i] : (u32)(words[WORDS - 1] >> 32);
        };
        int high = WORDS;
        while (high >= 0 && digit(high) == 0) high--;
        u64 upper = (u64)digit(high) << 32 | digit(high - 1);
        u32 shift = 0;
        while (high >= 0 && !(upper << shift >> 63)) shift++;
        // Shifts by 32 lose nothing of a number of 64 bits.
        u64 lower = (u64)digit(high - 2) << shift;
        bool lost = (u32)lower != 0;
        for (int i = 0; i < high - 2; i++) lost |= words[i] != 0;
        bits = upper << shift | lower >> 32 | lost;
        exponent = LOWEST + 32 * (high - 1) - (int)shift;
    }
};

// x * 2^n, rounded once, for an x from 1 to 2^64 and -2148 <= n <= 2139.
__device__ inline double scaled(double x, int n) {
    // A step down ends far above the subnormal numbers if another follows.
    for (; n < -1022; n += 969) x = times(x, __hiloint2double((1023 - 969) << 20, 0));
    for (; n > 1023; n -= 1023) x = times(x, __hiloint2double((1023 + 1023) << 20, 0));
    return times(x, __hiloint2double((1023 + n) << 20, 0));
}

// The nearest double to a carried sum that is not negative, ties to even.
__device__ inline double nearest(const u64* words) {
    Top top(words);
    if (!top.bits) return 0;
    // What lies below the last place, at least the 11 bits that do not fit 53.
    int drop = -1074 - top.exponent > 11 ? -1074 - top.exponent : 11;
    if (drop > 64) return 0;
    u64 kept = drop == 64 ? 0 : top.bits >> drop, lost = drop == 64 ? top.bits : top.bits << (64 - drop);
    u64 half = 1ull << 63;
    kept += lost > half || (lost == half && kept % 2);
    return scaled(__ull2double_rn(kept), top.exponent + drop);
}

// The square root of the nearest 53-bit number to a carried sum that is not negative.
__device__ inline double root_of(const u64* words) {
    Top top(words);
    if (!top.bits) return 0;
    int odd = (top.exponent % 2 + 2) % 2;
    double x = __ull2double_rn(top.bits);
    return scaled(root(odd ? plus(x, x) : x), (top.exponent - odd) / 2);
}
