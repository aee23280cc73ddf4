// Adam without corrections over a flat vector. Letters and formula: mod.rs. Reference: reference.rs.
// In f32 it reads p g m v and writes p m v: 28 bytes an element.

// constants: w1 b2 w2 l2 clip lr, of given: beta1 beta2 lambda clip
__device__ inline void uncorrected_constants(Row& row, double lr) {
    double beta2 = row.given[1], lambda = row.given[2], *c = row.constants;
    set_decay(row, lr);
    c[0] = minus(1.0, row.given[0]), c[1] = beta2, c[2] = minus(1.0, beta2);
    c[3] = times(lambda, lambda), c[4] = row.given[3], c[5] = lr;
}

template <typename Number>
struct Uncorrected {
    typedef Number T;
    static constexpr int STATES = 2;
    Frame<T> frame;
    T w1, b2, w2, l2, clip, lr;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        const double* c = row.constants;
        set(w1, c[0]), set(b2, c[1]), set(w2, c[2]);
        set(l2, c[3]), set(clip, c[4]), set(lr, c[5]);
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T g, T (&s)[2]) const {
        T g1 = frame.gradient(p, g);
        // Comparisons that are false for NaN, so that NaN passes through.
        g1 = g1 > clip ? clip : g1;
        g1 = g1 < -clip ? -clip : g1;
        s[0] = fused(w1, minus(g1, s[0]), s[0]);
        s[1] = fused(times(w2, g1), g1, times(b2, s[1]));
        T den = root(plus(s[1], l2));
        p = frame.descend(p, over(times(lr, s[0]), den));
    }
};

PREPARE(uncorrected, uncorrected_constants)
KERNELS(uncorrected, Uncorrected<float>, Uncorrected<double>)
KERNELS_BF16_STATE(uncorrected, Uncorrected<float>)
