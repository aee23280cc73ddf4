//! Independent work on all cores.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Applies `f` to each item, on as many threads as there are cores. Returns the results in the order of the items, or the
/// first item's error.
pub(crate) fn in_parallel<I: Sync, O: Send>(
    items: &[I],
    f: impl Fn(&I) -> anyhow::Result<O> + Sync,
) -> anyhow::Result<Vec<O>> {
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<(usize, anyhow::Result<O>)>> = Mutex::new(Vec::new());
    let work = || {
        loop {
            let idx = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(idx) else { return };
            let result = f(item);
            results.lock().unwrap_or_else(|poison| poison.into_inner()).push((idx, result));
        }
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..cores.min(items.len()) {
            scope.spawn(work);
        }
    });
    let mut results = results.into_inner().unwrap_or_else(|poison| poison.into_inner());
    results.sort_by_key(|(idx, _)| *idx);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::bail;

    #[test]
    fn parallel_work_keeps_its_order_and_its_first_error() {
        let items: Vec<usize> = (0..100).collect();
        assert_eq!(in_parallel(&items, |item| Ok(item * 2)).unwrap()[99], 198);
        let failing = |&item: &usize| if item % 10 == 7 { bail!("{item}") } else { Ok(item) };
        assert_eq!(in_parallel(&items, failing).unwrap_err().to_string(), "7");
        assert!(in_parallel(&[] as &[usize], failing).unwrap().is_empty());
    }
}
