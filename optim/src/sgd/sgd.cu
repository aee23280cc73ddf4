// SGD over a flat vector, without momentum and with its three forms. Letters and formula: mod.rs. Reference: reference.rs.
// In f32 it reads p g and writes p, 12 bytes an element; with momentum it reads and writes b too, 20 bytes.

constexpr u32 AVERAGE = 4, NESTEROV = 8;

template <typename Number, int MOMENTUM>
struct Sgd {
    typedef Number T;
    static constexpr int STATES = MOMENTUM;
    Frame<T> frame;
    T mu, w, r;
    bool average, nesterov, first;

    __device__ void set_from(const Row& row, const Step& now) {
        frame.set_from(row, now);
        const double* own = row.constants + OWN;
        set(mu, own[0]), set(w, own[1]), set(r, own[2]);
        average = row.flags & AVERAGE, nesterov = row.flags & NESTEROV, first = row.t == 1;
    }

    // One element; the only arithmetic of this file.
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

typedef Sgd<float, 0> Plain;
typedef Sgd<double, 0> PlainLong;
KERNELS(sgd, Plain, PlainLong)

typedef Sgd<float, 1> Momentum;
typedef Sgd<double, 1> MomentumLong;
KERNELS(momentum, Momentum, MomentumLong)
KERNELS_BF16_STATE(momentum, Momentum)
