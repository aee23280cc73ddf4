//! Compares two sets of parameters bit for bit.

/// Parameters by name, in registration order.
pub(crate) type Finals = Vec<(String, Vec<f32>)>;

/// Describes the first element in which two sets differ; `None` if all bits are equal.
pub(crate) fn first_difference(a: (&str, &Finals), b: (&str, &Finals)) -> Option<String> {
    let pairs = a.1.iter().zip(b.1);
    pairs.into_iter().find_map(|((name, x), (_, y))| {
        let i = x.iter().zip(y).position(|(x, y)| x.to_bits() != y.to_bits())?;
        Some(format!("{name}[{i}] is {:e} on {} and {:e} on {}", x[i], a.0, y[i], b.0))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finals(wte: [f32; 3], bias: [f32; 2]) -> Finals {
        vec![("wte".to_owned(), wte.to_vec()), ("bias".to_owned(), bias.to_vec())]
    }

    #[test]
    fn names_the_first_parameter_and_element_that_differ() {
        let (a, b) = (finals([1.0, 2.0, 3.0], [0.5, 0.25]), finals([1.0, 2.0, 3.0], [0.5, 0.75]));
        let difference = first_difference(("here", &a), ("there", &b)).unwrap();
        assert_eq!(difference, "bias[1] is 2.5e-1 on here and 7.5e-1 on there");
    }

    #[test]
    fn bits_are_compared_and_not_values() {
        let zero = finals([0.0; 3], [f32::NAN; 2]);
        assert_eq!(first_difference(("a", &zero), ("b", &zero.clone())), None);
        let minus = finals([0.0, -0.0, 0.0], [f32::NAN; 2]);
        assert!(first_difference(("a", &zero), ("b", &minus)).unwrap().starts_with("wte[1]"));
    }
}
