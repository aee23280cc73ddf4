//! Every rule in every recipe equals its reference, step after step; a step that is skipped between them changes nothing.

use crate::common::{Memory, Recipe, difference, long, rules};
use crate::simt::Device;
use crate::{Table, recipes, scalars, segment, step};
use meshstep_optim::cuda::{self, Step};
use meshstep_optim::{Isa, Rule};
use std::collections::BTreeSet;

/// What is updated: so many elements from `offset` on, for steps `first..=3`.
#[derive(Clone, Copy, Debug)]
struct Case {
    len: usize,
    offset: usize,
    first: u64,
}

/// 4 elements leave some streams aligned, 8 leave all.
const OFFSETS: [usize; 4] = [0, 1, 4, 8];

/// Lengths and offsets for the `row`th of all rules and recipes.
fn cases(row: usize) -> Vec<Case> {
    let all = |len| OFFSETS.map(|offset| Case { len, offset, first: 1 });
    let mut cases: Vec<_> = [0, 1, 127, 128, 129, 2049].into_iter().flat_map(all).collect();
    if long() {
        cases.extend([1000, 2048, 4099, 65_535, 65_537, 278_011].into_iter().flat_map(all));
    } else {
        cases.push(Case { len: 65_535, offset: 0, first: 2 });
        cases.push(Case { len: 65_537, offset: [1, 4, 8][row % 3], first: 2 });
        cases.push(Case { len: 278_011, offset: OFFSETS[row % 4], first: 3 });
    }
    cases
}

/// The kernel that made the steps.
fn compare(device: &Device, rule: &dyn Rule, recipe: &Recipe, case: Case) -> String {
    let Case { len, offset, first } = case;
    let start = Memory::of(rule, recipe, offset + len, (len + offset) as u64);
    let (mut expected, mut found, mut kernel) = (start.clone(), start, String::new());
    let group = [(rule, vec![segment(0..len, offset, first)])];
    let mut table = Table::new(device, recipe.params, &group);
    for t in first..=3 {
        let scalars = scalars(recipe, t);
        expected.new_grads(t);
        found.new_grads(t);
        expected.update(rule, Isa::Reference, offset, &[segment(0..len, offset, t)], &scalars).unwrap();
        // As many blocks as tiles, fewer, and more.
        let blocks = [1, 7, 100][t as usize % 3];
        for skip in [1, 0] {
            let step = Step { skip, ..step(&scalars) };
            kernel = table.step(&mut found, offset, recipe.rounding, step, blocks).unwrap();
        }
    }
    let different = difference(&found, &expected);
    assert_eq!(different, None, "{kernel} {rule:?} {recipe:?}: {case:?}");
    kernel
}

/// Rules with kernels in this folder.
fn rules_of(folder: &str) -> Vec<Box<dyn Rule>> {
    let of = |rule: &dyn Rule| rule.on_device().is_some_and(|hyper| cuda::module(hyper.family) == folder);
    rules().into_iter().filter(|rule| of(&**rule)).collect()
}

fn all_equal_their_reference(folder: &str) {
    let Some(device) = Device::of(folder) else { return };
    let (mut used, mut count) = (BTreeSet::new(), 0);
    for (row, rule) in rules_of(folder).iter().enumerate() {
        used.insert(cuda::prepare(rule.on_device().unwrap().family));
        for (column, recipe) in recipes().iter().filter(|recipe| recipe.suits(&**rule)).enumerate() {
            for case in cases(row + column) {
                used.insert(compare(&device, &**rule, recipe, case));
                count += 1;
            }
        }
    }
    let all: BTreeSet<String> = device.kernels().into_iter().collect();
    assert_eq!(used, all, "every kernel has run, and no other");
    println!("{folder}: {} kernels, {count} cases", all.len());
}

macro_rules! folders {
    ($($folder:ident)*) => {
        mod equals_its_reference {
            $(#[test]
            fn $folder() {
                super::all_equal_their_reference(stringify!($folder));
            })*
        }
    };
}
folders!(adam sgd);
