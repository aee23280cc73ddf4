//! Disk on which nothing is created until a gate opens.

use crate::hooked::{Call, Hooked};
use crate::layouts::DIR;
use meshstep_checkpoint::Store;
use meshstep_checkpoint_cases::Sim;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex};

/// Gate, closed at first.
#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// True if the gate is open, and the number of threads that wait.
    state: Mutex<(bool, usize)>,
    changed: Condvar,
    shattered: AtomicBool,
}

impl Gate {
    pub(crate) fn open(&self) {
        self.state.lock().unwrap().0 = true;
        self.changed.notify_all();
    }

    /// Opens the gate once a thread waits.
    pub(crate) fn open_for_one(&self) {
        let state = self.state.lock().unwrap();
        self.changed.wait_while(state, |(_, waiting)| *waiting == 0).unwrap().0 = true;
        self.changed.notify_all();
    }

    /// Waits until a thread waits.
    pub(crate) fn wait_for_one(&self) {
        let state = self.state.lock().unwrap();
        drop(self.changed.wait_while(state, |(_, waiting)| *waiting == 0).unwrap());
    }

    /// Lets every thread that comes to the gate panic.
    pub(crate) fn shatter(&self) {
        self.shattered.store(true, SeqCst);
    }

    fn pass(&self) {
        assert!(!self.shattered.load(SeqCst), "the test's disk panics");
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        drop(self.changed.wait_while(state, |(open, _)| !*open).unwrap());
    }
}

/// Returns the disk behind the gate.
pub(crate) fn behind(sim: Sim, gate: Arc<Gate>) -> Hooked<Sim> {
    Hooked::new(sim, move |call| {
        if let Call::Create = call {
            gate.pass();
        }
        Ok(())
    })
}

/// Returns a shared disk, the gate in front of it, and the store behind the gate.
pub(crate) fn gated() -> (Sim, Arc<Gate>, Store) {
    let (sim, gate) = (Sim::new(DIR), Arc::new(Gate::default()));
    let store = Store::on(Arc::new(behind(sim.clone(), Arc::clone(&gate))), DIR);
    (sim, gate, store)
}
