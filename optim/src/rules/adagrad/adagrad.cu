// Adagrad over a flat vector. Letters and formula: mod.rs. Reference: reference.rs.
// In f32 it reads p g sum and writes p sum: 20 bytes an element.

// constants: initial eps clr, of given: lr_decay initial_accumulator_value eps
__device__ inline void adagrad_constants(Row& row, double lr) {
    double before = __ull2double_rn(row.t - 1), *c = row.constants;
    c[0] = row.given[1], c[1] = row.given[2];
    c[2] = over(lr, plus(1.0, times(before, row.given[0])));
    set_decay(row, c[2]);
}

template <typename Number>
struct Adagrad {
    typedef Number T;
    static constexpr int STATES = 1;
    Frame<T> frame;
    T initial, eps, clr;
    bool first;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        const double* c = row.constants;
        set(initial, c[0]), set(eps, c[1]), set(clr, c[2]);
        first = row.t == 1;
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T g, T (&s)[1]) const {
        T g1 = frame.gradient(p, g);
        s[0] = fused(g1, g1, first ? initial : s[0]);
        T den = plus(root(s[0]), eps);
        p = frame.descend(p, over(times(clr, g1), den));
    }
};

PREPARE(adagrad, adagrad_constants)
KERNELS(adagrad, Adagrad<float>, Adagrad<double>)
KERNELS_BF16_STATE(adagrad, Adagrad<float>)
