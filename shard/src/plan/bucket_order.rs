//! Order in which the buckets of parts that are added together travel. Arithmetic only.

use crate::{Error, Part};
use meshstep_tensor::Param;
use std::cmp::Reverse;
use std::collections::HashMap;

/// Position of a parameter: in the registration order of all parts, or by unit, part and index.
type Position = (usize, usize, usize);

/// Returns the buckets of all parts, each as its part and its index there, in the order they travel: the order in which they fill
/// when gradients come in reverse registration order. A part's own buckets keep their order.
pub(crate) fn of(parts: &[&Part]) -> Result<Vec<(usize, usize)>, Error> {
    if let [part] = parts {
        return Ok((0..part.buckets().len()).map(|bucket| (0, bucket)).collect());
    }
    let mut order = Vec::new();
    for (i, positions) in positions(parts)?.iter().enumerate() {
        let mut last: Position = (usize::MAX, usize::MAX, usize::MAX);
        for (b, bucket) in parts[i].buckets().iter().enumerate() {
            let filled = bucket.params.iter().filter(|p| p.len > 0).map(|p| positions[p.param]);
            // No bucket goes before earlier buckets of its part.
            last = filled.fold(last, Position::min);
            order.push((Reverse(last), i, b));
        }
    }
    order.sort();
    Ok(order.into_iter().map(|(_, part, bucket)| (part, bucket)).collect())
}

/// Returns the items of all parts' buckets in this order.
pub(crate) fn sorted<T>(order: &[(usize, usize)], mut of_parts: Vec<Vec<T>>) -> Vec<T> {
    if of_parts.len() == 1 {
        // A part's own buckets keep their order, and a model may have many: they are not copied.
        return of_parts.remove(0);
    }
    let mut of_parts: Vec<_> = of_parts.into_iter().map(Vec::into_iter).collect();
    order.iter().filter_map(|&(part, _)| of_parts[part].next()).collect()
}

/// Moves all of `more` behind the items of `all`, without copies if there are none.
pub(crate) fn append<T>(all: &mut Vec<T>, mut more: Vec<T>) {
    if all.is_empty() {
        *all = more;
    } else {
        all.append(&mut more);
    }
}

/// Returns for each of `parts` the places of its buckets in an order that starts at `first`.
pub(crate) fn places(order: &[(usize, usize)], parts: usize, first: usize) -> Vec<Vec<usize>> {
    let mut places = vec![Vec::new(); parts];
    for (place, &(part, _)) in order.iter().enumerate() {
        places[part].push(first + place);
    }
    places
}

/// Returns the positions of each part's parameters. By default a forward pass reads unit after unit, and within a unit part after
/// part.
fn positions(parts: &[&Part]) -> Result<Vec<Vec<Position>>, Error> {
    let told = parts.iter().filter(|part| part.positions().is_some()).count();
    if told > 0 && told < parts.len() {
        let what = format!("the positions of {told} of {} parts", parts.len());
        return Err(Error::Shared {
            what,
            works: "positions for all parts that are added together, or for none",
        });
    }
    let mut units: HashMap<&str, usize> = HashMap::new();
    for unit in parts.iter().flat_map(|part| part.layout().units()).map(|unit| &**unit) {
        let next = units.len() + 1;
        units.entry(unit).or_insert(next);
    }
    let of = |(i, part): (usize, &&Part)| match part.positions() {
        Some(positions) => positions.iter().map(|&position| (position, i, 0)).collect(),
        None => {
            let unit = |param: &Param| param.unit().map_or(0, |unit| units[unit]);
            part.layout().params().iter().enumerate().map(|(p, param)| (unit(param), i, p)).collect()
        }
    };
    Ok(parts.iter().enumerate().map(of).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Master, Options, Precision, Sizes, Stage};
    use meshstep_tensor::{DType, Layout, LayoutBuilder};
    use proptest::prelude::*;

    /// Makes a part from `unit/name` or plain names; names that begin with e have no elements, names with h are of 16 bits.
    fn part(names: &[&str], bucket_len: usize, stage: Stage) -> Part {
        let add = |layout: LayoutBuilder, name: &&str| {
            let (unit, own) = name.split_once('/').unwrap_or(("", name));
            let layout = if unit.is_empty() { layout } else { layout.unit(unit) };
            let dtype = if own.starts_with('h') { DType::BF16 } else { DType::F32 };
            layout.param(*name, &[if own.starts_with('e') { 0 } else { 64 }], dtype)
        };
        let precision = Precision { master: Master::F32, ..Precision::default() };
        let options = Options { stage, bucket_len: Some(bucket_len), precision, ..Options::default() };
        let layout = names.iter().fold(Layout::builder(), add).build().unwrap();
        Part::new(layout, Sizes::all(1), [], &options).unwrap()
    }

    /// Returns the buckets in the order they travel, each as its parameters' names.
    fn travel(parts: &[&Part]) -> Vec<String> {
        let name = |&(part, b): &(usize, usize)| {
            let params = parts[part].layout().params();
            let placed = parts[part].buckets()[b].params.iter();
            placed.map(|p| params[p.param].name()).collect::<Vec<_>>().join(" ")
        };
        of(parts).unwrap().iter().map(name).collect()
    }

    #[test]
    fn parts_that_do_not_say_stand_in_units_then_one_after_another() {
        let each = |names: &[&str]| part(names, 64, Stage::Zero2);
        let (ab, cd) = (each(&["a", "b"]), each(&["c", "d"]));
        assert_eq!(travel(&[&ab, &cd]), ["d", "c", "b", "a"]);
        assert_eq!(travel(&[&cd, &ab]), ["b", "a", "d", "c"]);
        let matrices = each(&["table", "u/w", "v/w"]);
        let norms = each(&["u/n", "v/n", "last/n"]);
        assert_eq!(travel(&[&matrices, &norms]), ["last/n", "v/n", "v/w", "u/n", "u/w", "table"]);
        // A unit stands where it is first begun, in any part.
        let late = each(&["u/x", "last/w"]);
        assert_eq!(travel(&[&matrices, &late]), ["last/w", "v/w", "u/x", "u/w", "table"]);
        let crossed = each(&["last/w", "u/x"]);
        assert_eq!(travel(&[&matrices, &crossed]), ["v/w", "u/x", "last/w", "u/w", "table"]);
    }

    #[test]
    fn a_bucket_goes_when_its_first_parameter_has_come() {
        for (bucket_len, norms, expected) in [
            (64, [0, 3, 6], &["c", "x", "w", "b", "v", "u", "a"][..]),
            (64, [1, 2, 4], &["x", "w", "c", "v", "b", "a", "u"]),
            (128, [1, 2, 4], &["x w", "c b", "a", "v u"]),
        ] {
            let rest: Vec<usize> = (0..7).filter(|i| !norms.contains(i)).collect();
            let norms = part(&["a", "b", "c"], bucket_len, Stage::Zero2).at(norms.to_vec()).unwrap();
            let rest = part(&["u", "v", "w", "x"], bucket_len, Stage::Zero2).at(rest).unwrap();
            assert_eq!(travel(&[&norms, &rest]), expected);
        }
    }

    #[test]
    fn positions_are_of_all_parameters_and_of_all_parts() {
        let [a, b] = ["a", "b"].map(|name| part(&[name, "z"], 64, Stage::Zero2));
        for wrong in [&[][..], &[0], &[0, 1, 2], &[1, 0], &[1, 1]] {
            let error = a.clone().at(wrong.to_vec()).unwrap_err();
            assert!(matches!(error, Error::Shared { .. }), "{wrong:?}: {error}");
        }
        let told = a.at(vec![3, 8]).unwrap();
        let error = of(&[&told, &b]).unwrap_err();
        assert!(error.to_string().contains("the positions of 1 of 2 parts"), "{error}");
        assert!(of(&[&told, &b.at(vec![4, 5]).unwrap()]).is_ok());
    }

    /// Hands over gradients one by one, from the last; after each, every full bucket goes.
    fn one_by_one(parts: &[&Part], owners: &[usize]) -> Vec<(usize, usize)> {
        let mut here: Vec<Vec<bool>> = parts
            .iter()
            .map(|part| part.layout().params().iter().map(|param| param.is_empty()).collect())
            .collect();
        let mut gone = Vec::new();
        for position in (0..=owners.len()).rev() {
            if let Some(&part) = owners.get(position) {
                let index = owners[..position].iter().filter(|&&owner| owner == part).count();
                here[part][index] = true;
            }
            for (i, part) in parts.iter().enumerate() {
                let full = |b: &usize| part.buckets()[*b].params.iter().all(|p| here[i][p.param]);
                let full: Vec<_> = (0..part.buckets().len()).filter(full).map(|b| (i, b)).collect();
                gone.extend(full.into_iter().filter(|bucket| !gone.contains(bucket)).collect::<Vec<_>>());
            }
        }
        gone
    }

    proptest! {
        #[test]
        fn buckets_travel_as_they_fill(
            params in prop::collection::vec((0usize..4, prop::sample::select(&["f", "f", "f", "h", "e"][..])), 1..40),
            unit_len in 1usize..9,
            bucket_len in 1usize..400,
            stage in prop::sample::select(&[Stage::Replicated, Stage::Zero2, Stage::Zero3][..]),
        ) {
            let mut names: Vec<Vec<String>> = vec![Vec::new(); 4];
            let mut positions: Vec<Vec<usize>> = vec![Vec::new(); 4];
            for (i, (owner, kind)) in params.iter().enumerate() {
                names[*owner].push(format!("u{}/{kind}{i}", i / unit_len));
                positions[*owner].push(i);
            }
            let train = |own: &Vec<String>| own.iter().any(|name| !name.contains("/e"));
            prop_assume!(names.iter().all(|own| own.is_empty() || train(own)));
            let owners: Vec<usize> = (0..4).filter(|&owner| !names[owner].is_empty()).collect();
            let parts: Vec<Part> = owners
                .iter()
                .map(|&owner| {
                    let own: Vec<&str> = names[owner].iter().map(String::as_str).collect();
                    part(&own, bucket_len, stage).at(positions[owner].clone()).unwrap()
                })
                .collect();
            let parts: Vec<&Part> = parts.iter().collect();
            let of_params: Vec<usize> =
                params.iter().map(|(owner, _)| owners.iter().position(|o| o == owner).unwrap()).collect();
            let order = of(&parts).unwrap();
            prop_assert_eq!(&order, &one_by_one(&parts, &of_params));
            // With any positions, one part's buckets keep their order.
            for (i, &one) in parts.iter().enumerate() {
                let own: Vec<_> = (0..one.buckets().len()).map(|b| (0, b)).collect();
                prop_assert_eq!(of(&[one]).unwrap(), own);
                let places = places(&order, parts.len(), 100).swap_remove(i);
                prop_assert!(places.iter().enumerate().all(|(b, place)| order[place - 100] == (i, b)));
            }
        }
    }
}
