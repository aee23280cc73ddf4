// Norms, exactly: sums of squares or magnitudes in words, the largest magnitude, and how many elements are not finite. Added to
// what is there, the same words as NormAccumulator's in any order and any grid, once they are carried.
//
// Reads each element once, 16 bytes at a time, and writes nothing but the few words.

struct Sums {
    u64* non_finite;
    u64* words;     // WORDS of them; the infinity norm has none
    u64* max_bits;  // of the largest finite magnitude, as a double
};

// How a type of at most 32 bits keeps a number; SAME is f32. Numbers of `magnitude`, the bits without the sign, compare as
// integers do.
template <u32 FORMAT>
struct Float {
    static constexpr int FRACTION = FORMAT == SAME ? 23 : FORMAT == BF16 ? 7 : 10, BIAS = FORMAT == F16 ? 15 : 127;
    static constexpr u32 INFINITE = (FORMAT == SAME ? 0xFFu : FORMAT == BF16 ? 0xFFu : 0x1Fu) << FRACTION;

    // Of the leading bit; of a subnormal number, whose last bit is as low, that of the smallest normal one.
    __device__ static int exponent(u32 magnitude) {
        int field = (int)(magnitude >> FRACTION);
        return (field ? field : 1) - BIAS;
    }

    // The least magnitude whose `exponent` is as high: 0 if that of all is.
    __device__ static u32 least_of(int exponent) {
        int field = exponent + BIAS, most = (int)(INFINITE >> FRACTION);
        return field <= 1 ? 0 : (u32)(field < most ? field : most) << FRACTION;
    }
};

// A thread's elements of a tile as they are in memory: 64 bytes, as four runs of 16.
template <u32 FORMAT>
struct Raw {
    static constexpr u32 BYTES = FORMAT == SAME ? 4 : 2, N = 64 / BYTES, TILE = THREADS * N;
    u32 w[16];

    // Of the tile at `start`; zeros from `end` on. Which thread has which element does not matter.
    __device__ void load(const void* base, u64 start, u64 end) {
        if (end - start >= TILE && ((u64)base + start * BYTES) % 16 == 0) return load_whole(base, start);
#pragma unroll
        for (u32 i = 0; i < N; i++) {
            u64 at = start + threadIdx.x + i * THREADS;
            u32 bits = at < end ? FORMAT == SAME ? ((const u32*)base)[at] : ((const u16*)base)[at] : 0;
            if constexpr (FORMAT == SAME) w[i] = bits;
            else w[i / 2] = i % 2 ? w[i / 2] | bits << 16 : bits;
        }
    }

    // A finite element.
    __device__ float get(u32 i) const {
        if constexpr (FORMAT == SAME) return __uint_as_float(w[i]);
        else if constexpr (FORMAT == BF16) return __uint_as_float(i % 2 ? w[i / 2] & 0xFFFF0000u : w[i / 2] << 16);
        else return from_finite_f16(w[i / 2] >> i % 2 * 16);
    }

    // The largest magnitude, at least INFINITE where some element is not finite, and the least but zero, ~0 where all are zero.
    __device__ void extent(u32& most, u32& least) const {
        if constexpr (FORMAT == SAME) {
            most = 0, least = ~0u;
#pragma unroll
            for (u32 i = 0; i < 16; i++) {
                u32 bits = w[i] & 0x7FFFFFFFu;
                most = bits > most ? bits : most;
                // Zero becomes the largest.
                least = bits - 1 < least ? bits - 1 : least;
            }
            least = least == ~0u ? least : least + 1;
        } else {
            u32 upper = 0, lower = ABSENT;
#pragma unroll
            for (u32 i = 0; i < 16; i++) {
                // One less than the magnitude, below zero, of which the largest is the smallest; NaN of zero.
                u32 less = (w[i] | 0x80008000u) - 0x00010001u;
                upper = larger(upper, w[i] & 0x7FFF7FFFu), lower = larger_numbers(lower, less);
            }
            u32 one = upper & 0xFFFF, other = upper >> 16;
            most = one > other ? one : other;
            one = above_zero(lower & 0xFFFF), other = above_zero(lower >> 16);
            least = one < other ? one : other;
        }
    }

    __device__ u32 peak() const {
        u32 most, least;
        extent(most, least);
        return most;
    }

    // Elements that are not finite are counted, and zero from now on.
    __device__ u32 drop_non_finite() {
        return keep([](u32 magnitude, float) { return magnitude < Float<FORMAT>::INFINITE; });
    }

    // Makes elements zero of which `kept(magnitude, x)` says no; how many. Words go round so that the loop need not be
    // unrolled: registers have no index.
    template <typename Kept>
    __device__ u32 keep(Kept kept) {
        u32 dropped = 0;
#pragma unroll 1
        for (int turn = 0; turn < 16; turn++) {
            u32 mask = 0xFFFFFFFFu;
#pragma unroll
            for (u32 i = 0; i < N / 16; i++) {
                if (kept(magnitude(i), get(i))) continue;
                mask &= FORMAT == SAME ? 0 : i ? 0x0000FFFFu : 0xFFFF0000u;
                dropped++;
            }
            u32 first = w[0] & mask;
#pragma unroll
            for (int i = 1; i < 16; i++) w[i - 1] = w[i];
            w[15] = first;
        }
        return dropped;
    }

private:
    // A pair of NaN.
    static constexpr u32 ABSENT = 0x7FFF7FFFu;

    __device__ static u32 larger(u32 a, u32 b) { return FORMAT == BF16 ? larger_bf16s(a, b) : larger_f16s(a, b); }
    __device__ static u32 larger_numbers(u32 a, u32 b) {
        return FORMAT == BF16 ? larger_numbers_bf16(a, b) : larger_numbers_f16(a, b);
    }

    // The magnitude that `less` is one less than, if it is a number.
    __device__ static u32 above_zero(u32 less) {
        u32 bits = less & 0x7FFF;
        return bits > Float<FORMAT>::INFINITE ? ~0u : bits + 1;
    }

    __device__ u32 magnitude(u32 i) const {
        if constexpr (FORMAT == SAME) return w[i] & 0x7FFFFFFFu;
        else return w[i / 2] >> i % 2 * 16 & 0x7FFF;
    }

    __device__ void load_whole(const void* base, u64 start) {
        const char* from = (const char*)base + start * BYTES + threadIdx.x * 16;
#pragma unroll
        for (u32 run = 0; run < 4; run++) {
            // Nothing is read twice: the caches keep other lines. Measured on an H200: 0.97 of the time.
            uint4 x = __ldcs((const uint4*)(from + run * THREADS * 16));
            w[4 * run] = x.x, w[4 * run + 1] = x.y, w[4 * run + 2] = x.z, w[4 * run + 3] = x.w;
        }
    }
};

// A warp's sum of magnitudes or squares of numbers of at most 24 bits, in integers alone: devices differ in how quick they are
// in f64. All its threads call alike.
//
// x = high * 2^grid + low * 2^(grid - 23), where high, below 2^23, is what an f32 addition to 2^(grid + 23) makes of |x|, and
// low, at most 2^22 either way, what another makes of the rest. Where numbers span few binades, as bf16 ones of a tile do
// mostly, nothing is left but `high`. The grid is the warp's, chosen again when numbers do not fit; what is far smaller than
// those beside it is added to the words by itself.
template <u32 FORMAT, Norm NORM>
class Grids {
    typedef Float<FORMAT> F;
    // Bits of `high` and of `low`.
    static constexpr int BITS = 23;
    // How much larger than the first ones later numbers may be.
    static constexpr int SPARE = 1;
    // Where both grids are normal f32 numbers, and the sum of a number and the first is finite.
    static constexpr int LOWEST_GRID = -126, HIGHEST_GRID = 103;
    // One grid is enough for some numbers with as many bits.
    static constexpr bool HAS_ONE = F::FRACTION < BITS - 7;
    // Of a warp, before its integers exceed 63 bits: a tile has at most 2^10 squares of 2^46 each.
    static constexpr u32 MOST_TILES = 64;

    int grid;
    u32 above;               // magnitudes below this one have no more bits than `high`
    u32 from_one, from_two;  // the least that are whole multiples of the first grid, of the second
    u64 highs, mixed, lows;  // sums of high^2, high low and low^2; or of high, and low
    u32 tiles;

public:
    __device__ Grids() { begin(LOWEST_GRID); }

    // Adds a tile's elements; how many are not finite. `peak` rises to the largest that is.
    __device__ u32 add(Raw<FORMAT>& x, u32& peak, u64* words) {
        u32 most, least, non_finite = 0;
        x.extent(most, least);
        bool one = HAS_ONE, fits = most < above && least >= (HAS_ONE ? from_one : from_two);
        if (__any_sync(WARP_OF_32, !fits)) {
            if (__any_sync(WARP_OF_32, most >= F::INFINITE)) non_finite = x.drop_non_finite(), x.extent(most, least);
            one = make_fit(x, most, least, words) && HAS_ONE;
        }
        if (one) add_to_one(x);
        else add_to_two(x);
        peak = most > peak ? most : peak;
        if (++tiles == MOST_TILES) flush(words);
        return non_finite;
    }

    // Brings everything to the block's words.
    __device__ void flush(u64* words) {
        constexpr int POWER = NORM == L2 ? 2 : 1;
        bring(words, highs, POWER * grid);
        if (NORM == L2) bring(words, mixed, 2 * grid - BITS + 1);
        bring(words, lows, POWER * (grid - BITS));
        begin(grid);
    }

private:
    __device__ void begin(int new_grid) {
        grid = new_grid;
        above = F::least_of(grid + BITS);
        from_one = F::least_of(grid + F::FRACTION);
        from_two = F::least_of(grid - BITS + F::FRACTION);
        highs = mixed = lows = 0, tiles = 0;
    }

    __device__ static void bring(u64* words, u64 sum, int exponent) {
        u64 all = sum_of_warp(sum);
        if (threadIdx.x % 32 == 0 && all) deposit(words, (long long)all, exponent);
    }

    __device__ float first() const { return __uint_as_float((u32)(grid + BITS + 127) << 23); }
    __device__ float second() const { return __uint_as_float((u32)(grid + 127) << 23 | 1u << 22); }

    __device__ void add_to_one(const Raw<FORMAT>& x) {
        float one = first();
#pragma unroll
        for (u32 i = 0; i < Raw<FORMAT>::N; i++) {
            u32 high = __float_as_uint(plus(fabsf(x.get(i)), one)) - __float_as_uint(one);
            highs += NORM == L2 ? (u64)high * high : high;
        }
    }

    __device__ void add_to_two(const Raw<FORMAT>& x) {
        float one = first(), two = second();
#pragma unroll
        for (u32 i = 0; i < Raw<FORMAT>::N; i++) {
            float whole = plus(fabsf(x.get(i)), one);
            float rest = plus(minus(fabsf(x.get(i)), minus(whole, one)), two);
            int high = (int)(__float_as_uint(whole) - __float_as_uint(one));
            int low = (int)(__float_as_uint(rest) - __float_as_uint(two));
            if constexpr (NORM == L2) {
                highs += (u64)((long long)high * high), mixed += (u64)((long long)high * low);
                lows += (u64)((long long)low * low);
            } else {
                highs += (u64)high, lows += (u64)(long long)low;
            }
        }
    }

    // Finite elements of this extent: chooses the grid anew if that helps, and adds what fits no grid by itself. Whether one grid
    // is enough.
    __device__ bool make_fit(Raw<FORMAT>& x, u32 most, u32 least, u64* words) {
        most = (u32)max_of_warp(most), least = ~(u32)max_of_warp(~least);
        int wanted = F::exponent(most) - BITS + 1 + SPARE;
        wanted = wanted < LOWEST_GRID ? LOWEST_GRID : wanted > HIGHEST_GRID ? HIGHEST_GRID : wanted;
        bool one_then = most < F::least_of(wanted + BITS) && least >= F::least_of(wanted + F::FRACTION);
        if (!fits_one(most, least) && (one_then || !fits_two(most, least)) && wanted != grid) {
            flush(words);
            begin(wanted);
        }
        if (!fits_two(most, least)) x.keep([&](u32 magnitude, float x) {
            bool fits = !magnitude || fits_two(magnitude, magnitude);
            if (!fits) deposit_product(words, x, NORM == L2 ? x : x < 0 ? -1 : 1);
            return fits;
        });
        return fits_one(most, least);
    }

    __device__ bool fits_one(u32 most, u32 least) const { return most < above && least >= from_one; }
    __device__ bool fits_two(u32 most, u32 least) const { return most < above && least >= from_two; }
};

// Adds up what the threads of a block have.
__device__ inline void bring(const Sums& sums, u64 non_finite, u64 max_bits) {
    max_bits = max_of_warp(max_bits), non_finite = sum_of_warp(non_finite);
    if (threadIdx.x % 32 == 0) {
        if (max_bits) atomicMax(sums.max_bits, max_bits);
        if (non_finite) atomicAdd(sums.non_finite, non_finite);
    }
}

__device__ inline u64 as_double(float x) { return (u64)__double_as_longlong((double)x); }

template <u32 FORMAT, Norm NORM>
__device__ inline void add_norm(const void* values, const Span* spans, u64 count, u64 tiles, const Sums& sums) {
    __shared__ u64 words[WORDS];
    if (NORM != INF) clear(words, WORDS);
    u32 at = 0;
    Grids<FORMAT, NORM> grids;
    u64 non_finite = 0;
    u32 peak = 0, waiting = 0;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u64 start = begin_of<Raw<FORMAT>::TILE>(spans, at, count, tile);
        Raw<FORMAT> x;
        x.load(values, start, spans[at].end);
        if constexpr (NORM == INF) {
            u32 most = x.peak();
            if (most >= Float<FORMAT>::INFINITE) non_finite += x.drop_non_finite(), most = x.peak();
            peak = most > peak ? most : peak;
        } else {
            non_finite += grids.add(x, peak, words);
            if (++waiting == DRAIN_AFTER) drain(words, WORDS, sums.words), waiting = 0;
        }
    }
    Raw<FORMAT> of_peak{{peak}};
    bring(sums, non_finite, as_double(of_peak.get(0)));
    if (NORM == INF) return;
    grids.flush(words);
    drain(words, WORDS, sums.words);
}

// Of doubles: their sums take f64, and a tile has half as many bytes.
template <Norm NORM>
__device__ inline void add_norm_f64(const void* values, const Span* spans, u64 count, u64 tiles, const Sums& sums) {
    typedef Part<double, SAME> Part;
    __shared__ u64 words[WORDS];
    clear(words, WORDS);
    u32 at = 0;
    Dot<double> dot;
    dot.begin();
    u64 peak = 0, non_finite = 0;
    u32 waiting = 0;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u64 start = begin_of<Part::TILE>(spans, at, count, tile);
        double x[Part::N];
        Part::load(x, values, start, spans[at].end);
        for (u32 i = 0; i < Part::N; i++) {
            bool finite = is_finite(magnitude(x[i]));
            non_finite += !finite;
            x[i] = finite ? x[i] : 0;
        }
        Extent<double> extent(x);
        peak = extent.peak > peak ? extent.peak : peak;
        if constexpr (NORM == L2) {
            dot.add(x, x, extent, extent, words);
        } else if constexpr (NORM == L1) {
            double sign[Part::N];
            for (u32 i = 0; i < Part::N; i++) sign[i] = x[i] < 0 ? -1 : 1;
            dot.add(x, sign, extent, Extent<double>(sign), words);
        }
        if (++waiting == DRAIN_AFTER) drain(words, WORDS, sums.words), waiting = 0;
    }
    bring(sums, non_finite, peak);
    if (NORM == INF) return;
    dot.flush(words);
    drain(words, WORDS, sums.words);
}

// RESIDENT: blocks of a multiprocessor, which bounds registers.
#define NORM(NAME, RESIDENT, ...)                                                             \
    extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)                           \
        NAME(const void* values, const Span* spans, u64 count, u64 tiles, const Sums sums) {  \
        __VA_ARGS__(values, spans, count, tiles, sums);                                       \
    }
#define NORMS(NAME, RESIDENT, FORMAT)                      \
    NORM(norm_l1_##NAME, RESIDENT, add_norm<FORMAT, L1>)   \
    NORM(norm_l2_##NAME, RESIDENT, add_norm<FORMAT, L2>)   \
    NORM(norm_inf_##NAME, RESIDENT, add_norm<FORMAT, INF>)

NORMS(f32, 3, SAME)
NORMS(bf16, 4, BF16)
NORMS(f16, 4, F16)
NORM(norm_l1_f64, 3, add_norm_f64<L1>)
NORM(norm_l2_f64, 3, add_norm_f64<L2>)
NORM(norm_inf_f64, 3, add_norm_f64<INF>)

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

// Writes a sum, of a count, its words and the bits of the largest magnitude, into the vectors of an exchange: the count and the
// words, carried, of which `sum` has the weight between, and the magnitude. One block.
extern "C" __global__ void __launch_bounds__(THREADS) norm_write(const u64* from, u64* sum, u64* max) {
    __shared__ u64 words[WORDS];
    if (threadIdx.x < WORDS) words[threadIdx.x] = from[1 + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) {
        carry(words);
        sum[0] = from[0], max[0] = from[1 + WORDS];
    }
    __syncthreads();
    if (threadIdx.x < WORDS) sum[2 + threadIdx.x] = words[threadIdx.x];
}
