// Lion over a flat vector. Letters and formula: mod.rs. Reference: reference.rs.
// In f32 it reads p g m and writes p m: 20 bytes an element.

// constants: w1 w2 lr, of given: beta1 beta2
__device__ inline void lion_constants(Row& row, double lr) {
    double* c = row.constants;
    set_decay(row, lr);
    c[0] = minus(1.0, row.given[0]), c[1] = minus(1.0, row.given[1]), c[2] = lr;
}

template <typename Number>
struct Lion {
    typedef Number T;
    static constexpr int STATES = 1;
    Frame<T> frame;
    T w1, w2, lr;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        const double* c = row.constants;
        set(w1, c[0]), set(w2, c[1]), set(lr, c[2]);
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T g, T (&s)[1]) const {
        T g1 = frame.gradient(p, g), away = minus(g1, s[0]);
        T u = fused(w1, away, s[0]);
        s[0] = fused(w2, away, s[0]);
        // What is left for the product is a zero or NaN, and stays one.
        T step = u > 0 ? lr : u < 0 ? -lr : times(lr, u);
        p = frame.descend(p, step);
    }
};

PREPARE(lion, lion_constants)
KERNELS(lion, Lion<float>, Lion<double>)
KERNELS_BF16_STATE(lion, Lion<float>)
