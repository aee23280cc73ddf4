//! Compares two sets of parameters bit for bit.

use twox_hash::XxHash3_128;

/// Parameters by name, in registration order.
pub(crate) type Finals = Vec<(String, Vec<f32>)>;

/// Returns a digest of names, lengths and bits, by which the parameters of two programs are compared.
pub(crate) fn digest<'a>(all: impl IntoIterator<Item = &'a Finals>) -> String {
    let mut digest = XxHash3_128::new();
    for (name, values) in all.into_iter().flatten() {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        digest.write(format!("{name} {}:", values.len()).as_bytes());
        digest.write(&bytes);
    }
    format!("{:032x}", digest.finish_128())
}

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
    fn a_digest_is_of_names_lengths_and_bits() {
        let first = finals([0.0; 3], [1.0; 2]);
        let of = |finals: &Finals| digest([finals]);
        assert_eq!(of(&first), of(&first.clone()));
        let mut moved = first.clone();
        let last = moved[0].1.pop().unwrap();
        moved[1].1.insert(0, last);
        let mut renamed = first.clone();
        renamed[0].0 = "wtf".to_owned();
        for other in [finals([0.0, -0.0, 0.0], [1.0; 2]), moved, renamed] {
            assert_ne!(of(&other), of(&first), "{other:?}");
        }
        assert_ne!(digest([&first, &first]), of(&first));
    }

    #[test]
    fn bits_are_compared_and_not_values() {
        let zero = finals([0.0; 3], [f32::NAN; 2]);
        assert_eq!(first_difference(("a", &zero), ("b", &zero.clone())), None);
        let minus = finals([0.0, -0.0, 0.0], [f32::NAN; 2]);
        assert!(first_difference(("a", &zero), ("b", &minus)).unwrap().starts_with("wte[1]"));
    }
}
