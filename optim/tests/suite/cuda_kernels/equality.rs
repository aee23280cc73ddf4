//! Every rule in every recipe equals its reference, step after step; skipped steps in between change nothing.

use crate::common::{Memory, Recipe, difference, long, rules, tried};
use crate::cuda_kernels::{Table, recipes, scalars, segment, step};
use meshstep_optim::cuda::{self, StepScalars};
use meshstep_optim::{Isa, Moments, QhAdamW, Rule, Sees};
use meshstep_simt::Device;
use std::collections::{BTreeSet, HashMap};
use std::ops::RangeInclusive;

/// Length of the updated range, its offset, and the steps taken.
#[derive(Clone, Debug)]
struct Case {
    len: usize,
    offset: usize,
    steps: RangeInclusive<u64>,
}

/// An offset of 4 leaves some vectors aligned, one of 8 all of them.
const OFFSETS: [usize; 4] = [0, 1, 4, 8];

/// Returns the number of elements of the tensor before those of a case, so that groups of random bits begin at various points of a tile.
fn before(offset: usize) -> usize {
    offset * 77 / 8
}

/// Returns lengths and offsets for the `cell`th pair of a rule and a recipe.
fn cases(cell: usize) -> Vec<Case> {
    let all = |len| OFFSETS.map(|offset| Case { len, offset, steps: 1..=3 });
    let short = [0, 1, 127, 128, 129, 2049].into_iter().flat_map(all).enumerate();
    // At least one of the longest, so that every kernel runs.
    let chosen = short.filter(|(i, _)| *i == 20 + cell % 4 || tried(24 * cell + i, 4));
    let mut cases: Vec<_> = chosen.map(|(_, case)| case).collect();
    if long() {
        cases.extend([1000, 2048, 4099, 65_535, 65_537, 278_011].into_iter().flat_map(all));
    } else {
        let one = |len, offset, t| Case { len, offset, steps: t..=t };
        let large =
            [one(65_535, 0, 3), one(65_537, [1, 4, 8][cell % 3], 2), one(278_011, OFFSETS[cell % 4], 3)];
        // All lengths occur, with every rule of most folders.
        let chosen = large.into_iter().enumerate().filter(|(i, _)| tried(3 * cell + i, 20));
        cases.extend(chosen.map(|(_, case)| case));
    }
    cases
}

/// Compares the steps of a case; `start` has elements on both sides of the case's range. Returns the kernel's name.
fn compare(device: &Device, rule: &dyn Rule, recipe: &Recipe, start: Memory, case: &Case) -> String {
    let Case { len, offset, ref steps } = *case;
    let (mut expected, mut found, mut kernel) = (start.clone(), start, String::new());
    let group = [(rule, vec![segment(0..len, before(offset), *steps.start())])];
    let mut table = Table::new(device, recipe.params, &group);
    // For long vectors the fast CPU code, which has the same bits; the reference would take too long.
    let isa = if len < 65_535 || long() { Isa::Reference } else { Isa::detect() };
    for t in steps.clone() {
        let scalars = scalars(recipe, t);
        if t > *steps.start() {
            expected.new_grads(t);
            found.grads = expected.grads.clone();
        }
        expected.update(rule, isa, offset, &[segment(0..len, before(offset), t)], &scalars).unwrap();
        // As many blocks as tiles and more for short cases, fewer for long ones.
        let blocks = [1, 7, 3][t as usize % 3];
        for skip in [1, 0] {
            let step = StepScalars { skip, ..step(&scalars) };
            kernel = table.step(&mut found, offset, recipe.rounding, step, blocks).unwrap();
        }
    }
    let different = difference(&found, &expected);
    assert_eq!(different, None, "{kernel} {rule:?} {recipe:?}: {case:?}");
    kernel
}

/// Random memory with the maximum number of state vectors, created once for the cases of all rules; it is longer than the cases' ranges.
struct Starts<'a> {
    recipe: &'a Recipe,
    made: HashMap<usize, Memory>,
}

impl Starts<'_> {
    fn of(&mut self, rule: &dyn Rule, case: &Case) -> Memory {
        let moments = Moments::new(&[(0.9, 0.1); 4]).unwrap();
        let most = QhAdamW { moments, ..QhAdamW::default() };
        let len = case.len + 16;
        let made = self.made.entry(len).or_insert_with(|| Memory::of(&most, self.recipe, len, len as u64));
        let state = made.state[..rule.state().len()].to_vec();
        let Memory { params, grads, copy, remainder, .. } = made;
        Memory {
            params: params.clone(),
            grads: grads.clone(),
            state,
            copy: copy.clone(),
            remainder: remainder.clone(),
        }
    }
}

/// Returns the rules with kernels in this folder.
fn rules_of(folder: &str) -> Vec<Box<dyn Rule>> {
    let of = |rule: &dyn Rule| rule.on_device().is_some_and(|hyper| cuda::module(hyper.family) == folder);
    rules().into_iter().filter(|rule| of(&**rule)).collect()
}

fn all_equal_their_reference(folder: &str) {
    let Some(device) = Device::of(folder) else { return };
    let rules = rules_of(folder);
    let families = rules.iter().map(|rule| rule.on_device().unwrap().family);
    let mut used: BTreeSet<String> = families.map(cuda::prepare).collect();
    let mut count = 0;
    for (column, recipe) in recipes().iter().enumerate() {
        let mut starts = Starts { recipe, made: HashMap::new() };
        for (row, rule) in rules.iter().enumerate().filter(|(_, rule)| recipe.suits(&***rule)) {
            for case in cases(column * rules.len() + row) {
                used.insert(compare(&device, &**rule, recipe, starts.of(&**rule, &case), &case));
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
        /// Folders that have kernels.
        const FOLDERS: &[&str] = &[$(stringify!($folder)),*];

        mod equals_its_reference {
            $(#[test]
            fn $folder() {
                super::all_equal_their_reference(stringify!($folder));
            })*
        }
    };
}
folders!(adam sgd rmsprop adagrad lion adopt qhadamw schedulefree uncorrected);

/// A rule that sees single elements has kernels, in a folder that is tested here; other rules have none.
#[test]
fn rules_that_see_elements_have_kernels() {
    for rule in rules() {
        let folder = rule.on_device().map(|hyper| cuda::module(hyper.family));
        assert_eq!(folder.is_some(), rule.sees() == Sees::Elements, "{rule:?}");
        assert!(folder.is_none_or(|folder| FOLDERS.contains(&folder)), "{rule:?}");
    }
}
