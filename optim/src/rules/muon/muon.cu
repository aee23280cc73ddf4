// Muon: momentum, orthogonalisation, descent. Letters and formulas: mod.rs. References: steps.rs, orthogonalize.rs, product.rs.
//
// Momentum and descent are sweeps like those of other rules. The step takes the place of the parameters in the one, and of the
// gradients in the other. Between them a launch scales the matrices of a tensor by their exact norms, and three launches an
// iteration multiply them.

constexpr u32 NESTEROV = OWN, SUMS = 2 * OWN;

// constants: w mu length, of given: momentum, and last the adjustment of the rate
__device__ inline void muon_constants(Row& row, double lr) {
    double momentum = row.given[0], *c = row.constants;
    set_decay(row, lr);
    c[0] = minus(1.0, momentum), c[1] = momentum, c[2] = times(lr, row.given[10]);
}

template <typename Number>
struct Advance {
    typedef Number T;
    static constexpr int STATES = 1;
    T scale, w, mu;
    bool nesterov, sums;

    __device__ void set_from(const Row& row, const Step& now) {
        set(scale, row.flags & MAXIMIZE ? -now.grad_scale : now.grad_scale);
        set(w, row.constants[0]), set(mu, row.constants[1]);
        nesterov = row.flags & NESTEROV, sums = row.flags & SUMS;
    }

    // One element: all its arithmetic. The parameter is not read.
    __device__ void update(T& u, T g, T (&s)[1]) const {
        T g1 = times(g, scale), b = s[0];
        b = sums ? fused(mu, b, g1) : fused(w, minus(g1, b), b);
        u = !nesterov ? b : sums ? fused(mu, b, g1) : fused(mu, minus(b, g1), g1);
        s[0] = b;
    }
};

template <typename Number>
struct Apply {
    typedef Number T;
    static constexpr int STATES = 0;
    Frame<T> frame;
    T length;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        set(length, row.constants[2]);
    }

    __device__ void update(T& p, T o, T (&)[1]) const { p = frame.descend(p, times(length, o)); }
};

// What all launches of an orthogonalisation are told.
struct Due {
    const Step* step;
    const Row* row;  // null: the row is another rank's

    // Whether the step leaves the tensor alone: its matrices may hold anything then.
    __device__ bool rests() const { return step->skip || (row && row->start >> 63); }
};

// Matrices of equal size, end to end, and what norm_l2_* has added of each: a count, WORDS words, a magnitude.
struct Scaling {
    const void* from;
    void* to;
    const u64* norms;
    u64 len;  // of a matrix
    u64 count;
    double eps;
    u64 adds_eps;
    Due due;
};

constexpr u32 NORM_WORDS = WORDS + 2;
// Elements that a block scales before it asks for the next ones.
constexpr u32 PART_OF_MATRIX = THREADS * 8;

// The inverse of a matrix's norm. One thread.
__device__ inline double inverse_of(u64* words, const Scaling& s) {
    carry(words);
    double norm = root_of(words);
    return over(1.0, s.adds_eps ? plus(norm, s.eps) : norm > s.eps ? norm : s.eps);
}

template <typename T>
__device__ inline void scale(const Scaling& s) {
    __shared__ u64 words[WORDS];
    __shared__ double inverse;
    if (s.due.rests()) return;
    u64 parts = (s.len + PART_OF_MATRIX - 1) / PART_OF_MATRIX, at = ~0ull;
    for (u64 part = blockIdx.x; part < parts * s.count; part += gridDim.x) {
        u64 matrix = part / parts;
        if (matrix != at) {
            at = matrix;
            __syncthreads();
            if (threadIdx.x < WORDS) words[threadIdx.x] = s.norms[matrix * NORM_WORDS + 1 + threadIdx.x];
            __syncthreads();
            if (threadIdx.x == 0) inverse = inverse_of(words, s);
            __syncthreads();
        }
        u64 first = part % parts * PART_OF_MATRIX, end = first + PART_OF_MATRIX < s.len ? first + PART_OF_MATRIX : s.len;
        const T* from = (const T*)s.from + matrix * s.len;
        T* to = (T*)s.to + matrix * s.len;
        for (u64 i = first + threadIdx.x; i < end; i += THREADS) set(to[i], times((double)from[i], inverse));
    }
}

// A matrix in memory, or its transpose: element (i, j) is `down` i + `right` j elements from the first; one of them is 1.
struct Matrix {
    const void* data;
    u64 down, right;
};

// c = fma(cy, a b, cx base) of each of `count` matrices; without a base, c = a b. `a` has `rows` rows and `inner` columns.
struct Product {
    Matrix a, b;
    const void* base;  // row-major as `c` is
    void* c;
    u64 rows, cols, inner;
    u64 a_len, b_len, c_len;  // elements of a matrix
    u64 count;
    double cx, cy;
    u64 symmetric;
    Due due;
};

// Indices whose products are added before they are added to the sum: product.rs.
constexpr u32 BLOCK = 256;
// A block of threads computes a square of this side, each thread a square of 4. Of small matrices there are enough squares for all
// multiprocessors.
constexpr u32 SIDE = 64, OWN_SIDE = 4, ACROSS = SIDE / OWN_SIDE;
// Indices that are in shared memory at a time: a divisor of BLOCK.
constexpr u32 DEPTH = 16;
// Rows of shared memory are this long: neighbours in a column lie in different banks, and runs of 16 bytes are aligned.
constexpr u32 PITCH = SIDE + 4;

template <typename T>
struct Slice {
    T x[DEPTH][PITCH];

    // Columns `k` to `k + depth` of rows from `row` on, of a matrix with `rows` of them; zeros behind. Neighbours in a warp read
    // neighbours in memory.
    __device__ void load(const Matrix& m, u64 row, u64 rows, u64 k, u32 depth) {
#pragma unroll
        for (u32 n = 0; n < SIDE * DEPTH / THREADS; n++) {
            u32 at = n * THREADS + threadIdx.x;
            u32 i = m.right == 1 ? at / DEPTH : at % SIDE, j = m.right == 1 ? at % DEPTH : at / SIDE;
            bool exists = row + i < rows && j < depth;
            x[j][i] = exists ? ((const T*)m.data)[(row + i) * m.down + (k + j) * m.right] : 0;
        }
    }
};

// A thread's square of a product.
template <typename T>
struct Square {
    T sum[OWN_SIDE][OWN_SIDE];

    __device__ void clear() {
#pragma unroll
        for (u32 i = 0; i < OWN_SIDE; i++)
#pragma unroll
            for (u32 j = 0; j < OWN_SIDE; j++) sum[i][j] = 0;
    }

    __device__ void add_product(const T* a, const T* b) {
#pragma unroll
        for (u32 i = 0; i < OWN_SIDE; i++)
#pragma unroll
            for (u32 j = 0; j < OWN_SIDE; j++) sum[i][j] = fused(a[i], b[j], sum[i][j]);
    }

    __device__ void add(const Square& other) {
#pragma unroll
        for (u32 i = 0; i < OWN_SIDE; i++)
#pragma unroll
            for (u32 j = 0; j < OWN_SIDE; j++) sum[i][j] = plus(sum[i][j], other.sum[i][j]);
    }
};

// The square of the product from (row, col) on that this block's threads compute.
template <typename T>
__device__ inline void multiply(Square<T>& c, const Product& p, u64 matrix, u64 row, u64 col) {
    __shared__ Slice<T> left, right;
    Matrix a = p.a, b_turned{p.b.data, p.b.right, p.b.down};
    a.data = (const T*)a.data + matrix * p.a_len;
    b_turned.data = (const T*)b_turned.data + matrix * p.b_len;
    u32 down = threadIdx.x / ACROSS * OWN_SIDE, across = threadIdx.x % ACROSS * OWN_SIDE;
    Square<T> block;
    c.clear(), block.clear();
    for (u64 k = 0; k < p.inner; k += DEPTH) {
        u32 depth = p.inner - k < DEPTH ? (u32)(p.inner - k) : DEPTH;
        left.load(a, row, p.rows, k, depth);
        right.load(b_turned, col, p.cols, k, depth);
        __syncthreads();
        // Behind the last index both are zero, which changes no sum: at most -0 to 0, and those are the same once they are added.
#pragma unroll
        for (u32 j = 0; j < DEPTH; j++) block.add_product(left.x[j] + down, right.x[j] + across);
        if ((k + depth) % BLOCK == 0 || k + depth == p.inner) c.add(block), block.clear();
        // The next slices overwrite these.
        __syncthreads();
    }
}

template <typename T>
__device__ inline void store(const Square<T>& sums, const Product& p, u64 matrix, u64 row, u64 col) {
    const T* base = (const T*)p.base + matrix * p.c_len;
    T *c = (T*)p.c + matrix * p.c_len, cx, cy;
    set(cx, p.cx), set(cy, p.cy);
    u64 down = row + threadIdx.x / ACROSS * OWN_SIDE, across = col + threadIdx.x % ACROSS * OWN_SIDE;
#pragma unroll
    for (u32 i = 0; i < OWN_SIDE; i++)
#pragma unroll
        for (u32 j = 0; j < OWN_SIDE; j++) {
            u64 r = down + i, q = across + j;
            if (r >= p.rows || q >= p.cols) continue;
            T x = sums.sum[i][j];
            if (p.base) x = fused(cy, x, times(cx, base[r * p.cols + q]));
            c[r * p.cols + q] = x;
            // Squares above the diagonal are copies.
            if (p.symmetric && row != col) c[q * p.cols + r] = x;
        }
}

// Square `index` of those on and below the diagonal, row after row, or of all.
__device__ inline void place_of(const Product& p, u64 index, u64& row, u64& col) {
    u64 across = (p.cols + SIDE - 1) / SIDE;
    row = index / across, col = index % across;
    if (p.symmetric)
        for (row = 0, col = index; col > row;) col -= ++row;
    row *= SIDE, col *= SIDE;
}

template <typename T>
__device__ inline void products(const Product& p) {
    if (p.due.rests()) return;
    u64 down = (p.rows + SIDE - 1) / SIDE, across = (p.cols + SIDE - 1) / SIDE;
    u64 squares = p.symmetric ? down * (down + 1) / 2 : down * across;
    for (u64 at = blockIdx.x; at < squares * p.count; at += gridDim.x) {
        u64 row, col;
        place_of(p, at % squares, row, col);
        Square<T> sums;
        multiply(sums, p, at / squares, row, col);
        store(sums, p, at / squares, row, col);
    }
}

PREPARE(muon, muon_constants)

typedef Advance<float> Before;
typedef Advance<double> BeforeLong;
KERNEL(muon_advance_f32, Before, SAME, SAME)
KERNEL(muon_advance_f64, BeforeLong, SAME, SAME)
KERNEL(muon_advance_f32_state_bf16, Before, SAME, BF16)

typedef Apply<float> After;
typedef Apply<double> AfterLong;
KERNELS(muon_apply, After, AfterLong)

#define MATRIX_KERNEL(NAME, ARGUMENT, ...)                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) NAME(const ARGUMENT what) { \
        __VA_ARGS__(what);                                                            \
    }

MATRIX_KERNEL(muon_scale_f32, Scaling, scale<float>)
MATRIX_KERNEL(muon_scale_f64, Scaling, scale<double>)
MATRIX_KERNEL(muon_product_f32, Product, products<float>)
MATRIX_KERNEL(muon_product_f64, Product, products<double>)
