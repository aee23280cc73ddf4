//! Samples of one collective by all contestants, and their cells.

use meshstep_bench_cases::samples::Samples;

use crate::measure::peers::TorchTimes;
use crate::measure::record::Cell;

/// Samples of one case.
pub(super) struct Times {
    pub(super) shared: Samples,
    pub(super) sockets: Samples,
    pub(super) encrypted: Samples,
    pub(super) plain: Samples,
    pub(super) plain_with_sums: Samples,
    pub(super) gloo: TorchTimes,
    pub(super) mpi: Option<Samples>,
}

pub(super) const COLUMNS: &[&str] = &[
    "shared memory",
    "sockets",
    "encrypted",
    "socket reference",
    "socket reference with sums",
    "gloo",
    "OpenMPI",
    "gloo / shared memory",
    "OpenMPI / shared memory",
    "gloo / sockets",
    "gloo / socket reference",
    "sockets / socket reference",
    "sockets / socket reference with sums",
    "encrypted / sockets",
    "gloo's malloc",
    "gloo, usual malloc",
    "gloo, malloc kept",
    "gloo with a closing barrier",
];

impl Times {
    /// Divides all times by a number of operations.
    pub(super) fn over(self, times: usize) -> Self {
        let each = |samples: Samples| samples.times(1.0 / times as f64);
        Times {
            shared: each(self.shared),
            sockets: each(self.sockets),
            encrypted: each(self.encrypted),
            plain: each(self.plain),
            plain_with_sums: each(self.plain_with_sums),
            gloo: self.gloo.over(times),
            mpi: self.mpi.map(each),
        }
    }

    pub(super) fn cells(&self) -> Vec<Cell> {
        let Times { shared, sockets, encrypted, plain, plain_with_sums, gloo, mpi } = self;
        let ratio = |above: &Samples, below: &Samples| Cell::Ratio(above.over(below).median());
        let missing = || Cell::Text("not measured".to_owned());
        let (malloc, better) = gloo.better();
        let mut cells: Vec<Cell> =
            [shared, sockets, encrypted, plain, plain_with_sums, better].map(time).into();
        cells.push(mpi.as_ref().map_or_else(missing, time));
        cells.push(ratio(better, shared));
        cells.push(mpi.as_ref().map_or_else(missing, |mpi| ratio(mpi, shared)));
        cells.extend([ratio(better, sockets), ratio(better, plain), ratio(sockets, plain)]);
        cells.extend([ratio(sockets, plain_with_sums), ratio(encrypted, sockets)]);
        cells.push(Cell::Text(malloc.to_owned()));
        cells.extend(of_settings(gloo));
        cells
    }
}

/// Returns the times of both programs, and of the faster one with a closing barrier.
pub(super) fn of_settings(gloo: &TorchTimes) -> [Cell; 3] {
    let with_barrier = gloo.with_barrier.as_ref().map_or(Cell::None, time);
    [time(&gloo.usual), time(&gloo.kept), with_barrier]
}

pub(super) fn time(samples: &Samples) -> Cell {
    Cell::Time(samples.median())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_column_has_a_cell_and_ratios_use_the_faster_gloo() {
        let samples = |seconds: f64| [seconds; 3].into_iter().collect::<Samples>();
        let gloo = TorchTimes { usual: samples(8.0), kept: samples(6.0), with_barrier: Some(samples(7.0)) };
        let [shared, sockets, encrypted, plain, plain_with_sums] = [2.0, 3.0, 4.0, 3.0, 5.0].map(samples);
        let times = Times { shared, sockets, encrypted, plain, plain_with_sums, gloo, mpi: None };
        let cells = times.over(2).cells();
        assert_eq!(cells.len(), COLUMNS.len());
        assert_eq!(cells[5], time(&samples(3.0)));
        assert_eq!(cells[7], Cell::Ratio(samples(3.0).median()));
        let last = [4.0, 3.0, 3.5].map(|seconds| time(&samples(seconds)));
        assert_eq!((&cells[14], &cells[15..]), (&Cell::Text("kept".into()), &last[..]));
    }
}
