// Dot products and sums of squares without rounding, many terms at a time: norm/block.rs says why it is exact.
//
// Let terms be at most 2^b, and multiples of 2^(b - 95). A thread adds up to 16 to a number that starts at 1.5 * 2^(b + 5), so
// that it stays in one binade, whose last place is 2^(b - 47): what is added is the term rounded to that grid, and the bits,
// as an integer, rise by as many as there are grids in it. What is left of a term, at most half a grid, is added to a second
// such number, 48 powers of two lower, whose grid is 2^(b - 95): nothing is left then. Both are read as integers, which add
// up for 64 times, of all threads of a warp, before they exceed 63 bits.
//
// b is the warp's, chosen by the first terms and again when others do not fit. A term that is far smaller than those beside
// it is added to the words by itself. In f32 an element costs four additions in f64, a conversion and four operations on
// integers that find the extent; votes, counts and whatever is shared come once in eight elements.

constexpr int MOST_TERMS = 16, FIRST_GRID = 47, SECOND_GRID = 95;
// Of a warp, before integers of up to 2^(51 + 5) each exceed 63 bits.
constexpr u32 MOST_SUMS = 64;
// How much larger than the first ones later terms may be.
constexpr int SPARE = 3;
constexpr u32 WARP_OF_32 = 0xFFFFFFFFu;

__device__ inline u64 shuffled(u64 x, int lanes) {
    u32 low = __shfl_xor_sync(WARP_OF_32, (u32)x, lanes), high = __shfl_xor_sync(WARP_OF_32, (u32)(x >> 32), lanes);
    return (u64)high << 32 | low;
}

__device__ inline u64 sum_of_warp(u64 x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += shuffled(x, lanes);
    return x;
}

__device__ inline u64 max_of_warp(u64 x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) {
        u64 other = shuffled(x, lanes);
        x = other > x ? other : x;
    }
    return x;
}

__device__ inline u64 magnitude(double x) { return (u64)__double_as_longlong(x) & ~(1ull << 63); }

// What differs between the types that terms are computed from.
template <typename T>
struct Kind;

// A product of two floats is a double.
template <>
struct Kind<float> {
    typedef u32 Bits;
    static constexpr int FRACTION = 23, BIAS = 127, SUBNORMAL = -127, LANES = 1;
    // Products from 2^(b - WINDOW) on are multiples of the second grid.
    static constexpr int WINDOW = SECOND_GRID - 2 * FRACTION, LEAST_BOUND = -900, LARGEST_BOUND = 1000;
};

// A product of two doubles is its rounding and what was lost, which is at most 2^(b - 54), and has its own numbers.
template <>
struct Kind<double> {
    typedef u64 Bits;
    // A product with a subnormal number may have more bits behind it than its exponents tell: it never fits.
    static constexpr int FRACTION = 52, BIAS = 1023, SUBNORMAL = -5000, LANES = 2, LOWER = 53;
    static constexpr int WINDOW = SECOND_GRID + LOWER - 2 * FRACTION - 1;
    // From the least on, what was lost and its grids are doubles; to the largest, sums are.
    static constexpr int LEAST_BOUND = -1074 + SECOND_GRID + LOWER, LARGEST_BOUND = 1000;
};

// Above all exponents.
constexpr int BEYOND = 1 << 20;

__device__ inline int exponent_of(u32 magnitude) { return (int)(magnitude >> 23) - 127; }
__device__ inline int exponent_of(u64 magnitude) {
    return magnitude >> 52 ? (int)(magnitude >> 52) - 1023 : Kind<double>::SUBNORMAL;
}
__device__ inline bool is_finite(u32 magnitude) { return magnitude < 0x7F800000u; }
__device__ inline bool is_finite(u64 magnitude) { return magnitude < 0x7FFull << 52; }

// Of a thread's few elements.
template <typename T>
struct Extent {
    typedef typename Kind<T>::Bits Bits;
    Bits peak;
    int low, high;  // exponents of the least but zero, or one less, and of the largest

    Extent() = default;

    template <int N>
    __device__ explicit Extent(const T (&x)[N]) {
        Bits least = ~(Bits)0;
        peak = 0;
#pragma unroll
        for (int i = 0; i < N; i++) {
            Bits bits = magnitude(x[i]);
            peak = bits > peak ? bits : peak;
            // Zero becomes the largest and does not count.
            least = bits - 1 < least ? bits - 1 : least;
        }
        low = exponent_of(least);
        high = is_finite(peak) ? exponent_of(peak) : BEYOND;
    }
};

// 1.5 * 2^(bound + 5).
__device__ inline double magic(int bound) { return __hiloint2double((bound + 5 + 1023) << 20 | 1 << 19, 0); }

// The two numbers of a thread, and what they have counted.
struct Lane {
    double first, second;
    u64 firsts, seconds;

    __device__ void begin(int bound) {
        first = magic(bound), second = magic(bound - FIRST_GRID - 1);
        firsts = seconds = 0;
    }

    __device__ void add(double term) {
        double next = plus(first, term);
        second = plus(second, plus(minus(first, next), term));
        first = next;
    }

    // The product is a double.
    __device__ void add_product(double x, double y) {
        double next = fused(x, y, first);
        second = plus(second, fused(x, y, minus(first, next)));
        first = next;
    }

    // After at most MOST_TERMS.
    __device__ void count(int bound) {
        double one = magic(bound), other = magic(bound - FIRST_GRID - 1);
        firsts += (u64)__double_as_longlong(first) - (u64)__double_as_longlong(one), first = one;
        seconds += (u64)__double_as_longlong(second) - (u64)__double_as_longlong(other), second = other;
    }

    __device__ void deposit_into(u64* words, int bound) const {
        u64 one = sum_of_warp(firsts), other = sum_of_warp(seconds);
        if (threadIdx.x % 32 != 0) return;
        deposit(words, (long long)one, bound - FIRST_GRID);
        deposit(words, (long long)other, bound - SECOND_GRID);
    }
};

// A warp's part of a dot product. All its threads call alike.
template <typename T>
struct Dot {
    typedef Kind<T> K;
    Lane lanes[K::LANES];
    int bound;
    u32 sums;

    __device__ void begin() { begin(K::LEAST_BOUND); }

    // Adds the products of up to MOST_TERMS elements; words are the block's. Of what is not finite nothing is added.
    template <int N>
    __device__ void add(const T (&x)[N], const T (&y)[N], const Extent<T>& a, const Extent<T>& b, u64* words) {
        static_assert(N <= MOST_TERMS, "terms of one sum");
        bool fits = fits_below(a.high + b.high) && fits_above(a.low + b.low);
        if (__any_sync(WARP_OF_32, !fits)) add_apart(x, y, words);
        else add_fitting(x, y);
        if (sums == MOST_SUMS) flush(words);
    }

    // Brings everything to the block's words.
    __device__ void flush(u64* words) {
        if (!sums) return;
        for (int i = 0; i < K::LANES; i++) lanes[i].deposit_into(words, bound_of(i));
        begin(bound);
    }

private:
    __device__ void begin(int new_bound) {
        bound = new_bound, sums = 0;
        for (int i = 0; i < K::LANES; i++) lanes[i].begin(bound_of(i));
    }

    __device__ int bound_of(int lane) const {
        if constexpr (K::LANES == 2) return bound - lane * K::LOWER;
        else return bound;
    }

    __device__ bool fits_below(int exponents) const { return exponents + 2 <= bound; }
    __device__ bool fits_above(int exponents) const { return exponents >= bound - K::WINDOW; }

    template <int N>
    __device__ void add_fitting(const T (&x)[N], const T (&y)[N]) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            if constexpr (K::LANES == 1) {
                lanes[0].add_product(x[i], y[i]);
            } else {
                double product = times(x[i], y[i]);
                lanes[0].add(product);
                lanes[1].add(fused(x[i], y[i], -product));
            }
        }
        for (int i = 0; i < K::LANES; i++) lanes[i].count(bound_of(i));
        sums++;
    }

    // Chooses the bound anew if need be, and adds what fits it together, all else by itself.
    template <int N>
    __device__ void add_apart(const T (&given)[N], const T (&with)[N], u64* words) {
        T x[N], y[N];
        int peak = -BEYOND;
#pragma unroll
        for (int i = 0; i < N; i++) {
            bool counts = is_finite(magnitude(given[i])) && is_finite(magnitude(with[i]));
            counts = counts && given[i] != 0 && with[i] != 0;
            x[i] = counts ? given[i] : 0, y[i] = counts ? with[i] : 0;
            int exponents = exponents_of(x[i], y[i]);
            peak = counts && exponents > peak ? exponents : peak;
        }
        peak = (int)max_of_warp((u64)(peak + BEYOND)) - BEYOND;
        if (peak == -BEYOND) return;
        if (!fits_below(peak) || !fits_above(peak)) {
            flush(words);
            int wanted = peak + 2 + SPARE;
            begin(wanted < K::LEAST_BOUND ? K::LEAST_BOUND : wanted > K::LARGEST_BOUND ? K::LARGEST_BOUND : wanted);
        }
        // Elements go round so that the loop need not be unrolled: registers have no index.
#pragma unroll 1
        for (int turn = 0; turn < N; turn++) {
            T a = x[0], b = y[0];
            int exponents = exponents_of(a, b);
            if (a != 0 && !(fits_below(exponents) && fits_above(exponents))) {
                deposit_product(words, a, b);
                a = b = 0;
            }
#pragma unroll
            for (int i = 1; i < N; i++) x[i - 1] = x[i], y[i - 1] = y[i];
            x[N - 1] = a, y[N - 1] = b;
        }
        add_fitting(x, y);
    }

    __device__ static int exponents_of(T a, T b) { return exponent_of(magnitude(a)) + exponent_of(magnitude(b)); }
};

// A block adds fewer than 2^14 terms of 32 bits to a word in a tile, so carries may wait for 2^16 tiles: then words are drained.
constexpr u32 DRAIN_AFTER = 1 << 16;

// A range of the flat memory, and the tiles of all ranges before it.
struct Span {
    u64 start;
    u64 end;
    u64 tile;
};

// Where a tile of so many elements begins; `at` becomes the span that has it.
template <u32 TILE>
__device__ inline u64 begin_of(const Span* spans, u32& at, u64 count, u64 tile) {
    u64 start = spans[at].start + (tile - spans[at].tile) * TILE;
    if (start < spans[at].end) return start;
    at = find(spans, at, count, tile);
    return spans[at].start + (tile - spans[at].tile) * TILE;
}

// A thread's elements of a tile: 32 bytes, as two runs of 16.
template <typename T, u32 FORMAT>
struct Part {
    static constexpr u32 BYTES = FORMAT == SAME ? sizeof(T) : 2, RUN = 16 / BYTES;
    static constexpr u32 N = 2 * RUN, TILE = THREADS * N;

    // Of the tile at `start`; zeros from `end` on. Which thread has which element does not matter.
    __device__ static void load(T (&x)[N], const void* base, u64 start, u64 end) {
        if (end - start >= TILE && ((u64)base + start * BYTES) % 16 == 0) return load_whole(x, base, start);
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            u64 at = start + threadIdx.x + i * THREADS;
            x[i] = at < end ? Vector<T, FORMAT>::read(base, nullptr, at) : 0;
        }
    }

private:
    __device__ static void load_whole(T (&x)[N], const void* base, u64 start) {
        u32 w[8];
#pragma unroll
        for (u32 run = 0; run < 2; run++)
            load_16_bytes(w + 4 * run, (const char*)base + (start + (threadIdx.x + run * THREADS) * RUN) * BYTES);
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            if constexpr (BYTES == 8) x[i] = __hiloint2double((int)w[2 * i + 1], (int)w[2 * i]);
            else if constexpr (BYTES == 4) x[i] = __uint_as_float(w[i]);
            else if constexpr (FORMAT == BF16) x[i] = from_bf16(w[i / 2] >> i % 2 * 16 & 0xFFFF);
            else x[i] = from_f16(w[i / 2] >> i % 2 * 16 & 0xFFFF);
        }
    }
};
