//! Minimum of the cubic through two points with slopes.

/// Point on the line: step length, loss and slope.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Point {
    pub(super) t: f64,
    pub(super) f: f64,
    pub(super) gtd: f64,
}

/// Returns the minimum of the cubic through `a` and `b`, clamped to `bounds`, or the middle of `bounds` if the cubic has no minimum or is
/// not finite (PyTorch returns NaN then).
///
/// Nocedal and Wright, *Numerical Optimization* (2006), equation 3.59.
pub(super) fn minimum(a: Point, b: Point, bounds: (f64, f64)) -> f64 {
    let (low, high) = bounds;
    let d1 = a.gtd + b.gtd - 3.0 * (a.f - b.f) / (a.t - b.t);
    let square = d1 * d1 - a.gtd * b.gtd;
    if !(square >= 0.0 && square.is_finite()) {
        return (low + high) / 2.0;
    }
    let d2 = square.sqrt();
    let at = if a.t <= b.t {
        b.t - (b.t - a.t) * ((b.gtd + d2 - d1) / (b.gtd - a.gtd + 2.0 * d2))
    } else {
        a.t - (a.t - b.t) * ((a.gtd + d2 - d1) / (a.gtd - b.gtd + 2.0 * d2))
    };
    if at.is_nan() { (low + high) / 2.0 } else { at.max(low).min(high) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_minimum_of_a_cubic_is_found_from_any_two_points() {
        // t^3 - 3t has its minimum at 1.
        let point = |t: f64| Point { t, f: t * t * t - 3.0 * t, gtd: 3.0 * t * t - 3.0 };
        for (a, b) in [(0.0, 2.0), (2.0, 0.0), (0.5, 3.0), (-0.5, 1.5)] {
            let found = minimum(point(a), point(b), (-10.0, 10.0));
            assert!((found - 1.0).abs() < 1e-14, "from {a} and {b}: {found}");
            assert_eq!(minimum(point(a), point(b), (1.5, 2.0)), 1.5);
        }
    }

    #[test]
    fn without_a_minimum_it_is_the_middle() {
        let (a, up) = (Point { t: 0.0, f: 1.0, gtd: -1.0 }, Point { t: 4.0, f: f64::INFINITY, gtd: 0.0 });
        assert_eq!(minimum(a, up, (0.0, 4.0)), 2.0);
        // Slopes of the same sign with a chord slope between them: the derivative never vanishes.
        let on = Point { t: 1.0, f: 0.5, gtd: -1.0 };
        assert_eq!(minimum(a, on, (0.0, 1.0)), 0.5);
    }
}
