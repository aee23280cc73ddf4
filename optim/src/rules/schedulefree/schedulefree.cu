// Schedule-free AdamW over a flat vector, and its way to the parameters to evaluate. Letters and formula: mod.rs, averaging.rs,
// evaluation.rs. Reference: reference.rs. In f32 it reads p g z v and writes p z v: 28 bytes an element.

// base^exponent: averaging.rs.
__device__ inline double real_power(double base, double exponent) {
    u64 whole = (u64)exponent;
    double result = power(base, whole), root_of = base, left = minus(exponent, __ull2double_rn(whole));
    while (left > 0.0 && root_of > 1.0) {
        root_of = root(root_of);
        left = times(left, 2.0);
        if (left >= 1.0) result = times(result, root_of), left = minus(left, 1.0);
    }
    return result;
}

// 1^a + ... + n^a.
__device__ inline double sum_of_powers(u64 n, double a, double zeta) {
    constexpr u64 SUMMED = 32;
    if (n <= SUMMED) {
        double sum = 0.0;
        for (u64 i = 1; i <= n; i++) sum = plus(sum, real_power(__ull2double_rn(i), a));
        return sum;
    }
    double x = __ull2double_rn(n);
    double third = times(times(a, minus(a, 1.0)), minus(a, 2.0)), inverse = over(1.0, x);
    double fifth = times(times(third, minus(a, 3.0)), minus(a, 4.0)), square = times(inverse, inverse);
    double inner = minus(over(third, 720.0), times(square, over(fifth, 30240.0)));
    double corrections = times(inverse, minus(over(a, 12.0), times(square, inner)));
    double smooth = times(real_power(x, a), plus(plus(over(x, plus(a, 1.0)), 0.5), corrections));
    return plus(smooth, zeta);
}

// constants: b2 w2 bc2s eps lr c k, of given: beta1 beta2 eps warmup r q zeta_r zeta_q offset
__device__ inline void schedulefree_constants(Row& row, double lr) {
    double beta1 = row.given[0], beta2 = row.given[1], warmup = row.given[3], *c = row.constants;
    double n = __ull2double_rn(row.t), r = row.given[4], q = row.given[5];
    bool rises = n <= warmup;
    double sum = sum_of_powers(row.t, rises ? q : r, rises ? row.given[7] : row.given[6]);
    double share = over(real_power(n, rises ? q : r), rises ? sum : plus(row.given[8], sum));
    double now = n < warmup ? times(lr, over(n, warmup)) : lr;
    set_decay(row, now);
    c[0] = beta2, c[1] = minus(1.0, beta2);
    c[2] = root(minus(1.0, power(beta2, row.t)));
    c[3] = row.given[2], c[4] = now, c[5] = share;
    c[6] = minus(times(beta1, minus(1.0, share)), 1.0);
}

template <typename Number>
struct ScheduleFree {
    typedef Number T;
    static constexpr int STATES = 2;
    Frame<T> frame;
    T b2, w2, bc2s, eps, lr, c, k;
    bool first;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        const double* of = row.constants;
        set(b2, of[0]), set(w2, of[1]), set(bc2s, of[2]), set(eps, of[3]);
        set(lr, of[4]), set(c, of[5]), set(k, of[6]);
        first = row.t == 1;
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T g, T (&s)[2]) const {
        T g1 = frame.gradient(p, g);
        s[1] = fused(times(w2, g1), g1, times(b2, s[1]));
        T den = plus(over(root(s[1]), bc2s), eps);
        T d = fused(frame.lw, p, over(times(lr, g1), den));
        T z = first ? p : s[0];
        p = fused(k, d, fused(c, minus(z, p), p));
        s[0] = minus(z, d);
    }
};

// constants: beyond, of given: beta1
__device__ inline void evaluation_constants(Row& row, double) {
    row.constants[0] = minus(1.0, over(1.0, row.given[0]));
}

template <typename Number>
struct Evaluation {
    typedef Number T;
    static constexpr int STATES = 2;
    T beyond;
    bool first;

    __device__ void set_from(const Row& row, const Step&) {
        set(beyond, row.constants[0]);
        first = row.t == 1;
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T, T (&s)[2]) const {
        T x = fused(beyond, minus(s[0], p), p);
        p = first ? p : x;
    }
};

PREPARE(schedulefree, schedulefree_constants)
KERNELS(schedulefree, ScheduleFree<float>, ScheduleFree<double>)
KERNELS_BF16_STATE(schedulefree, ScheduleFree<float>)

PREPARE(schedulefree_evaluation, evaluation_constants)
KERNELS(schedulefree_evaluation, Evaluation<float>, Evaluation<double>)
KERNELS_BF16_STATE(schedulefree_evaluation, Evaluation<float>)
