// SGD over a flat vector, without momentum and with its three forms. Letters and formula: mod.rs. Reference: reference.rs.
// In f32 it reads p g and writes p, 12 bytes an element; with momentum it reads and writes b too, 20 bytes.

constexpr u32 AVERAGE = OWN, NESTEROV = 2 * OWN, DEBIAS = 4 * OWN, LR_INSIDE = 8 * OWN;

// constants: r
__device__ inline void sgd_constants(Row& row, double lr) {
    set_decay(row, lr);
    row.constants[0] = lr;
}

// constants: r mu w, of given: momentum dampening
__device__ inline void momentum_constants(Row& row, double lr) {
    double momentum = row.given[0], dampening = row.given[1], *c = row.constants;
    set_decay(row, lr);
    c[0] = lr, c[1] = momentum;
    c[2] = row.t == 1 ? 1.0 : minus(1.0, dampening);
    if (row.flags & AVERAGE) c[2] = minus(1.0, momentum);
    if (row.flags & DEBIAS) c[0] = over(lr, minus(1.0, power(momentum, row.t)));
    if (row.flags & LR_INSIDE) c[0] = 1.0, c[2] = lr;
}

template <typename Number, int MOMENTUM>
struct Sgd {
    typedef Number T;
    static constexpr int STATES = MOMENTUM;
    Frame<T> frame;
    T mu, w, r;
    bool average, nesterov, first;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        set(r, row.constants[0]);
        if constexpr (MOMENTUM) {
            set(mu, row.constants[1]), set(w, row.constants[2]);
            average = row.flags & AVERAGE, nesterov = row.flags & NESTEROV, first = row.t == 1;
        }
    }

    // One element: all its arithmetic.
    __device__ void update(T& p, T g, T (&s)[1]) const {
        T g1 = frame.gradient(p, g), u = g1;
        if constexpr (MOMENTUM) {
            T b = s[0], x = times(w, g1);
            // What the buffer held before the first step may be NaN: it is not read.
            b = average ? fused(w, minus(g1, b), b) : first ? x : fused(mu, b, x);
            u = nesterov ? fused(mu, b, g1) : b;
            s[0] = b;
        }
        p = frame.descend(p, times(r, u));
    }
};

PREPARE(sgd, sgd_constants)

typedef Sgd<float, 0> Plain;
typedef Sgd<double, 0> PlainLong;
KERNELS(sgd, Plain, PlainLong)

PREPARE(sgd_momentum, momentum_constants)

typedef Sgd<float, 1> Momentum;
typedef Sgd<double, 1> MomentumLong;
KERNELS(sgd_momentum, Momentum, MomentumLong)
KERNELS_BF16_STATE(sgd_momentum, Momentum)
