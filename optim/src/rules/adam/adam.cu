// Adam, AdamW and AMSGrad over a flat vector. Letters and formula: mod.rs. Reference: reference.rs.
// In f32 it reads p g m v and writes p m v: 28 bytes an element.

// The larger; NaN if one is.
template <typename T>
__device__ inline T larger(T x, T y) {
    return y > x ? y : y <= x ? x : plus(x, y);
}

// constants: w1 b2 w2 bc2s eps step, of given: beta1 beta2 eps
__device__ inline void adam_constants(Row& row, double lr) {
    double beta1 = row.given[0], beta2 = row.given[1], *c = row.constants;
    set_decay(row, lr);
    c[0] = minus(1.0, beta1), c[1] = beta2, c[2] = minus(1.0, beta2);
    c[3] = root(minus(1.0, power(beta2, row.t)));
    c[4] = row.given[2];
    c[5] = over(lr, minus(1.0, power(beta1, row.t)));
}

template <typename Number, bool AMSGRAD>
struct Adam {
    typedef Number T;
    static constexpr int STATES = AMSGRAD ? 3 : 2;
    Frame<T> frame;
    T w1, b2, w2, bc2s, eps, step;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        const double* c = row.constants;
        set(w1, c[0]), set(b2, c[1]), set(w2, c[2]);
        set(bc2s, c[3]), set(eps, c[4]), set(step, c[5]);
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T g, T (&s)[STATES]) const {
        T g1 = frame.gradient(p, g);
        s[0] = fused(w1, minus(g1, s[0]), s[0]);
        s[1] = fused(times(w2, g1), g1, times(b2, s[1]));
        if constexpr (AMSGRAD) s[2] = larger(s[2], s[1]);
        T den = plus(over(root(s[STATES - 1]), bc2s), eps);
        p = frame.descend(p, over(times(step, s[0]), den));
    }
};

PREPARE(adam, adam_constants)

typedef Adam<float, false> Plain;
typedef Adam<double, false> PlainLong;
KERNELS(adam, Plain, PlainLong)
KERNELS_BF16_STATE(adam, Plain)

PREPARE(adam_amsgrad, adam_constants)

typedef Adam<float, true> Largest;
typedef Adam<double, true> LargestLong;
KERNELS(adam_amsgrad, Largest, LargestLong)
KERNELS_BF16_STATE(adam_amsgrad, Largest)
