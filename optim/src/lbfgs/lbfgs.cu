// L-BFGS on whole vectors: exact products of the history's rows with a vector, the direction, the steps along it. Bit for bit:
// norm/dot.rs and lbfgs/vectors.rs.

// Products of every row with `x`. `sums` has the words of row 0, of row 1, and so on.
struct Products {
    const void* x;
    const void* const* rows;
    u64 count;
    const Span* spans;
    u64 span_count;
    u64 tiles;
    u64* sums;
};

// A block takes ROWS rows at a time, which share what is read of `x`; blocks that follow each other take other rows of the same
// tiles, so that memory gives `x` once and the cache does the rest. In f32 a product costs four additions in f64.
template <typename T, int ROWS>
__device__ inline void add_products(const Products& p) {
    typedef Part<T, SAME> Part;
    __shared__ u64 words[ROWS * WORDS];
    clear(words, ROWS * WORDS);
    u64 packs = (p.count + ROWS - 1) / ROWS, share = gridDim.x > packs && packs ? gridDim.x / packs : 1;
    for (u64 item = blockIdx.x; item < packs * share; item += gridDim.x) {
        u64 row = item % packs * ROWS;
        u32 at = 0;
        int here = p.count - row < ROWS ? (int)(p.count - row) : ROWS;
        u64* to = p.sums + row * WORDS;
        u32 waiting = 0;
        Dot<T> dots[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) dots[r].begin();
        for (u64 tile = item / packs; tile < p.tiles; tile += share) {
            u64 start = begin_of<Part::TILE>(p.spans, at, p.span_count, tile), end = p.spans[at].end;
            T x[Part::N], y[ROWS][Part::N];
            Part::load(x, p.x, start, end);
#pragma unroll
            for (int r = 0; r < ROWS; r++) Part::load(y[r], p.rows[row + (r < here ? r : 0)], start, end);
            Extent<T> extent(x);
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                if (r < here) dots[r].add(x, y[r], extent, Extent<T>(y[r]), words + r * WORDS);
            if (++waiting == DRAIN_AFTER) drain(words, here * WORDS, to), waiting = 0;
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) dots[r].flush(words + r * WORDS);
        drain(words, here * WORDS, to);
    }
}

#define PRODUCTS(NAME, T, ROWS)                                                    \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const Products p) { \
        add_products<T, ROWS>(p);                                                  \
    }
PRODUCTS(lbfgs_gram_f32, float, 2)
PRODUCTS(lbfgs_gram_f64, double, 2)
PRODUCTS(lbfgs_dot_f32, float, 1)
PRODUCTS(lbfgs_dot_f64, double, 1)

// Elements of 16 bytes, or one.
template <int N>
__device__ inline void load(float (&x)[N], const void* base, u64 at) {
    if constexpr (N == 1) {
        x[0] = ((const float*)base)[at];
    } else {
        u32 w[4];
        load_16_bytes(w, (const float*)base + at);
        for (int i = 0; i < 4; i++) x[i] = __uint_as_float(w[i]);
    }
}
template <int N>
__device__ inline void load(double (&x)[N], const void* base, u64 at) {
    if constexpr (N == 1) {
        x[0] = ((const double*)base)[at];
    } else {
        u32 w[4];
        load_16_bytes(w, (const double*)base + at);
        for (int i = 0; i < 2; i++) x[i] = __hiloint2double((int)w[2 * i + 1], (int)w[2 * i]);
    }
}
// Of memory that the kernel does not write: from an address that a table has told, which only such a load knows to be global.
template <typename T, int N>
__device__ inline void load_unwritten(T (&x)[N], const void* base, u64 at) {
    const T* from = (const T*)base + at;
    if constexpr (N == 1) {
        x[0] = __ldg(from);
    } else if constexpr (sizeof(T) == 4) {
        uint4 w = __ldg((const uint4*)from);
        x[0] = __uint_as_float(w.x), x[1] = __uint_as_float(w.y);
        x[2] = __uint_as_float(w.z), x[3] = __uint_as_float(w.w);
    } else {
        uint4 w = __ldg((const uint4*)from);
        x[0] = __hiloint2double((int)w.y, (int)w.x), x[1] = __hiloint2double((int)w.w, (int)w.z);
    }
}
template <int N>
__device__ inline void store(const float (&x)[N], void* base, u64 at) {
    if constexpr (N == 1) {
        ((float*)base)[at] = x[0];
    } else {
        u32 w[4];
        for (int i = 0; i < 4; i++) w[i] = __float_as_uint(x[i]);
        store_16_bytes(w, (float*)base + at);
    }
}
template <int N>
__device__ inline void store(const double (&x)[N], void* base, u64 at) {
    if constexpr (N == 1) {
        ((double*)base)[at] = x[0];
    } else {
        u32 w[4];
        for (int i = 0; i < 2; i++) {
            u64 bits = (u64)__double_as_longlong(x[i]);
            w[2 * i] = (u32)bits, w[2 * i + 1] = (u32)(bits >> 32);
        }
        store_16_bytes(w, (double*)base + at);
    }
}

// Calls `pass.run(x, at)` for all elements, with room for 16 bytes of them where `bits`, of all addresses, allow.
template <typename T, typename P>
__device__ inline void each(const P& pass, u64 len, u64 bits) {
    constexpr int RUN = 16 / sizeof(T);
    u64 mine = (u64)blockIdx.x * THREADS + threadIdx.x, all = (u64)gridDim.x * THREADS;
    u64 runs = bits % 16 == 0 ? len / RUN : 0;
    for (u64 i = mine; i < runs; i += all) {
        T x[RUN];
        pass.run(x, i * RUN);
    }
    for (u64 i = runs * RUN + mine; i < len; i += all) {
        T x[1];
        pass.run(x, i);
    }
}

// x = t d + start.
template <typename T>
struct Walk {
    void* x;
    const void *start, *d;
    T t;

    template <int N>
    __device__ void run(T (&out)[N], u64 at) const {
        T from[N], along[N];
        load(from, start, at), load(along, d, at);
        for (int i = 0; i < N; i++) out[i] = fused(t, along[i], from[i]);
        store(out, x, at);
    }
};

// start = x, x = t d + start.
template <typename T>
struct Leave {
    void *x, *start;
    const void* d;
    T t;

    template <int N>
    __device__ void run(T (&out)[N], u64 at) const {
        T from[N], along[N];
        load(from, x, at), load(along, d, at);
        store(from, start, at);
        for (int i = 0; i < N; i++) out[i] = fused(t, along[i], from[i]);
        store(out, x, at);
    }
};

// y = g - before.
template <typename T>
struct Difference {
    void* y;
    const void *g, *before;

    template <int N>
    __device__ void run(T (&out)[N], u64 at) const {
        T now[N], then[N];
        load(now, g, at), load(then, before, at);
        for (int i = 0; i < N; i++) out[i] = minus(now[i], then[i]);
        store(out, y, at);
    }
};

// d = coef g + sum over i of coefs[i] rows[i], in f64 by fused multiply-adds in that order, rounded once.
struct Combination {
    void* d;
    const void* g;
    const void* const* rows;
    const double* coefs;
    u64 count;
    u64 len;
    double coef;
};

template <typename T>
struct Combine {
    // Rows whose loads are on their way together.
    static constexpr int TOGETHER = 16 / sizeof(T);
    const Combination& c;

    template <int ROWS, int N>
    __device__ void add_rows(double (&sum)[N], u64 row, u64 at) const {
        T x[ROWS][N];
#pragma unroll
        for (int r = 0; r < ROWS; r++) load_unwritten(x[r], c.rows[row + r], at);
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            double coef = c.coefs[row + r];
            for (int i = 0; i < N; i++) sum[i] = fused(coef, (double)x[r][i], sum[i]);
        }
    }

    template <int N>
    __device__ void run(T (&out)[N], u64 at) const {
        double sum[N];
        load(out, c.g, at);
        for (int i = 0; i < N; i++) sum[i] = times(c.coef, (double)out[i]);
        u64 row = 0;
        for (; row + TOGETHER <= c.count; row += TOGETHER) add_rows<TOGETHER>(sum, row, at);
        for (; row < c.count; row++) add_rows<1>(sum, row, at);
        for (int i = 0; i < N; i++) set(out[i], sum[i]);
        store(out, c.d, at);
    }
};

template <typename T>
__device__ inline void combine(const Combination& c) {
    u64 bits = (u64)c.d | (u64)c.g;
    for (u64 row = 0; row < c.count; row++) bits |= (u64)c.rows[row];
    each<T>(Combine<T>{c}, c.len, bits);
}

#define VECTORS(NAME, T)                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        lbfgs_walk_##NAME(void* x, const void* start, const void* d, double t, u64 len) {                    \
        Walk<T> walk{x, start, d};                                                                           \
        set(walk.t, t);                                                                                      \
        each<T>(walk, len, (u64)x | (u64)start | (u64)d);                                                    \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        lbfgs_leave_##NAME(void* x, void* start, const void* d, double t, u64 len) {                         \
        Leave<T> leave{x, start, d};                                                                         \
        set(leave.t, t);                                                                                     \
        each<T>(leave, len, (u64)x | (u64)start | (u64)d);                                                   \
    }                                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                    \
        lbfgs_difference_##NAME(void* y, const void* g, const void* before, u64 len) {                       \
        each<T>(Difference<T>{y, g, before}, len, (u64)y | (u64)g | (u64)before);                            \
    }                                                                                                        \
    /* With six blocks of a multiprocessor no register is spilled. */                                        \
    extern "C" __global__ void __launch_bounds__(THREADS, 6) lbfgs_combine_##NAME(const Combination c) {     \
        combine<T>(c);                                                                                       \
    }
VECTORS(f32, float)
VECTORS(f64, double)
