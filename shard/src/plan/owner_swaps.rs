//! Exchange of matrices between owners: lowers the largest cost of a rank in all windows together. Arithmetic only.

use crate::plan::matrix_exchange::{ExchangeWindow, ExchangedMatrix};

/// Ratio of the largest cost to an even one below which changes would gain less than the longer ways of the pieces cost.
const EVEN: f64 = 1.05;
/// Ratio above which a window may take longer for a change.
const UNEVEN: f64 = 1.15;
/// Changes that are compared before the search ends. Transformers of 200 matrices on up to 64 ranks need about a tenth.
const MOST_COMPARED: usize = 1 << 22;

/// One rank's matrices in one window.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    cost: u64,
    elements: usize,
}

/// A change of owners in one window between the costliest rank and `rank`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Change {
    /// Larger cost of both ranks afterwards.
    most: u64,
    window: usize,
    rank: usize,
    what: Traded,
}

/// Matrices that a change moves, by index in the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Traded {
    /// All that travel: the two ranks change places.
    All,
    /// One of the costliest rank goes to the other, and one of the other may come back.
    One { matrix: usize, back: Option<usize> },
}

/// Lowers the largest of `totals`, the ranks' costs in all windows, by changes that leave the largest cost and the most elements of a rank
/// in each window as they are; only far from an even cost may a window's largest cost grow, and its most elements by a half. Each change is the one that leaves its two
/// ranks with the smallest maximum.
pub(super) fn even_out(windows: &mut [ExchangeWindow], totals: &mut [u64]) {
    let mut loads: Vec<Vec<Load>> = windows.iter().map(|window| loads(window, totals.len())).collect();
    let even = totals.iter().sum::<u64>() as f64 / totals.len() as f64;
    let mut compared = 0;
    while let Some(from) = (0..totals.len()).rev().max_by_key(|&rank| totals[rank]) {
        compared += windows.iter().map(|window| count(window, from, totals.len())).sum::<usize>();
        if totals[from] as f64 <= EVEN * even || compared > MOST_COMPARED {
            return;
        }
        let best = |longer: bool| {
            let of_window = |(window, (w, loads)): (usize, (&ExchangeWindow, &Vec<Load>))| {
                Search { from, totals, window, matrices: &w.matrices, loads }.best(longer)
            };
            windows.iter().zip(&loads).enumerate().filter_map(of_window).min()
        };
        let uneven = totals[from] as f64 > UNEVEN * even;
        let Some(change) = best(false).or_else(|| best(true).filter(|_| uneven)) else { return };
        let Change { window, rank, what, .. } = change;
        for (i, matrix) in windows[window].matrices.iter_mut().enumerate() {
            let to = match what {
                Traded::All if !matrix.travels() => continue,
                Traded::All if matrix.owner == from => rank,
                Traded::All if matrix.owner == rank => from,
                Traded::One { matrix, .. } if matrix == i => rank,
                Traded::One { back, .. } if back == Some(i) => from,
                _ => continue,
            };
            move_to(to, matrix, &mut loads[window], totals);
        }
    }
}

fn loads(window: &ExchangeWindow, ranks: usize) -> Vec<Load> {
    let mut loads = vec![Load::default(); ranks];
    for matrix in &window.matrices {
        loads[matrix.owner].cost += matrix.cost;
        loads[matrix.owner].elements += elements(matrix);
    }
    loads
}

/// Returns the number of changes that a search for a better owner than `from` compares.
fn count(window: &ExchangeWindow, from: usize, ranks: usize) -> usize {
    let travel = || window.matrices.iter().filter(|matrix| matrix.travels());
    travel().filter(|matrix| matrix.owner == from).count() * (ranks + travel().count()) + ranks
}

/// Returns the elements of the scratch memory that a matrix takes on its owner.
fn elements(matrix: &ExchangedMatrix) -> usize {
    if matrix.travels() { matrix.elements() } else { 0 }
}

fn move_to(rank: usize, matrix: &mut ExchangedMatrix, loads: &mut [Load], totals: &mut [u64]) {
    let (cost, elements, before) = (matrix.cost, elements(matrix), matrix.owner);
    (loads[before].cost, totals[before]) = (loads[before].cost - cost, totals[before] - cost);
    loads[before].elements -= elements;
    (loads[rank].cost, totals[rank]) = (loads[rank].cost + cost, totals[rank] + cost);
    loads[rank].elements += elements;
    matrix.owner = rank;
}

/// Search for the best change in a window.
struct Search<'a> {
    /// The costliest rank.
    from: usize,
    totals: &'a [u64],
    window: usize,
    matrices: &'a [ExchangedMatrix],
    loads: &'a [Load],
}

impl Search<'_> {
    /// Returns the best change; a window may become `longer` by it.
    fn best(&self, longer: bool) -> Option<Change> {
        let travel = || self.matrices.iter().enumerate().filter(|(_, matrix)| matrix.travels());
        let limit = Load {
            cost: if longer { u64::MAX } else { self.loads.iter().map(|load| load.cost).max()? },
            elements: self.loads.iter().map(|load| load.elements).max()? / 2 * if longer { 3 } else { 2 },
        };
        let own = travel().filter(|(_, matrix)| matrix.owner == self.from);
        let changes = own.flat_map(|(matrix, _)| {
            let alone = (0..self.totals.len()).map(|rank| (rank, None));
            let swaps = travel().map(|(back, other)| (other.owner, Some(back)));
            alone.chain(swaps).filter_map(move |(rank, back)| self.one(matrix, rank, back, limit))
        });
        changes.chain((0..self.totals.len()).filter_map(|rank| self.all(rank))).min()
    }

    /// Returns the change that lowers the costliest rank's cost by `less`, if no rank has as much afterwards.
    fn change(&self, rank: usize, less: u64, what: Traded) -> Option<Change> {
        let (before, after) = (self.totals[self.from], self.totals[rank] + less);
        let most = after.max(before - less);
        (less > 0 && most < before).then_some(Change { most, window: self.window, rank, what })
    }

    /// Returns the exchange of all matrices that travel, which changes no load of the window except those of matrices that do not.
    fn all(&self, rank: usize) -> Option<Change> {
        let stays = |rank: usize| self.matrices.iter().any(|m| m.owner == rank && !m.travels());
        let less = self.loads[self.from].cost.checked_sub(self.loads[rank].cost)?;
        let change = self.change(rank, less, Traded::All)?;
        (!stays(rank) && !stays(self.from)).then_some(change)
    }

    /// Returns the change that moves one matrix, if it stays within the window's limits.
    fn one(&self, matrix: usize, rank: usize, back: Option<usize>, limit: Load) -> Option<Change> {
        let (given, taken) = (&self.matrices[matrix], back.map(|back| &self.matrices[back]));
        let (cost, came) = taken.map_or((0, 0), |matrix| (matrix.cost, elements(matrix)));
        let less = given.cost.checked_sub(cost).filter(|_| rank != self.from)?;
        let load = self.loads[rank];
        let within =
            load.cost + less <= limit.cost && load.elements + elements(given) <= limit.elements + came;
        self.change(rank, less, Traded::One { matrix, back }).filter(|_| within)
    }
}
