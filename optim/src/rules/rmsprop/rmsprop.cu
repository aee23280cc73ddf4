// RMSprop over a flat vector, plain or centered, with or without momentum. Letters and formula: mod.rs. Reference:
// reference.rs. In f32 it reads p g sa and writes p sa, 20 bytes an element; each further state takes 8 more.

// constants: a w eps mu lr, of given: alpha eps momentum
__device__ inline void rmsprop_constants(Row& row, double lr) {
    double alpha = row.given[0], *c = row.constants;
    set_decay(row, lr);
    c[0] = alpha, c[1] = minus(1.0, alpha), c[2] = row.given[1], c[3] = row.given[2], c[4] = lr;
}

template <typename Number, bool CENTERED, bool MOMENTUM>
struct RmsProp {
    typedef Number T;
    static constexpr int STATES = 1 + CENTERED + MOMENTUM;
    Frame<T> frame;
    T a, w, eps, mu, lr;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        const double* c = row.constants;
        set(a, c[0]), set(w, c[1]), set(eps, c[2]), set(mu, c[3]), set(lr, c[4]);
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T g, T (&s)[STATES]) const {
        T g1 = frame.gradient(p, g);
        s[0] = fused(times(w, g1), g1, times(a, s[0]));
        T var = s[0];
        if constexpr (CENTERED) {
            s[1] = fused(w, minus(g1, s[1]), s[1]);
            T rest = fused(-s[1], s[1], var);
            var = rest < 0 ? 0 : rest;
        }
        T u = over(g1, plus(root(var), eps));
        if constexpr (MOMENTUM) u = s[STATES - 1] = fused(mu, s[STATES - 1], u);
        p = frame.descend(p, times(lr, u));
    }
};

// One of the four forms.
#define FORM(NAME, TYPE, CENTERED, MOMENTUM)                \
    typedef RmsProp<float, CENTERED, MOMENTUM> TYPE;        \
    typedef RmsProp<double, CENTERED, MOMENTUM> TYPE##Long; \
    PREPARE(NAME, rmsprop_constants)                        \
    KERNELS(NAME, TYPE, TYPE##Long)                         \
    KERNELS_BF16_STATE(NAME, TYPE)

FORM(rmsprop, Plain, false, false)
FORM(rmsprop_centered, Centered, true, false)
FORM(rmsprop_momentum, Momentum, false, true)
FORM(rmsprop_centered_momentum, Both, true, true)
