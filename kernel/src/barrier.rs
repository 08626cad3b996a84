//! Waits until runs of programs have ended, as `bpf/barrier.h` explains.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use libbpf_rs::{MapCore, MapFlags, MapHandle, ProgramInput, ProgramMut};

use crate::Error;
use crate::intf::generated::{BARRIER_HAS_RUN as HAS_RUN, BARRIER_RUNS as RUNS};
use crate::object::{LoadedObject, write};

/// The packet of a test run: an Ethernet header, which is the shortest packet that a program at TC accepts.
const FRAME: [u8; 14] = [0; 14];

/// Lets userspace wait until the runs of BPF programs have ended. All threads of a process share one `Barrier`.
///
/// A thread unlinks an entry of a map and then calls [`Self::now`]. It may reuse the entry once [`Self::is_over`] is
/// true for that moment, or after [`Self::wait_since`] has returned. Waits are numbered when they begin. A
/// moment is the number of the next wait, and is over when a wait with this or a higher number has ended. Many threads
/// can therefore share one wait, which takes some 10 ms.
pub struct Barrier {
    barrier: MapHandle,
    nothing: MapHandle,
    /// Number of waits (for program runs to end) that have begun so far.
    begun: AtomicU64,
    /// Number of the latest wait (for program runs to end) that has ended.
    ended: AtomicU64,
}

/// A point in time, identified by the first wait that begins after it.
#[derive(Clone, Copy, Debug)]
pub struct Moment(u64);

impl Barrier {
    /// Opens the barrier, and tests that the kernel waits as expected.
    ///
    /// # Errors
    /// Fails if the kernel does not wait, because map entries would then be reused while programs still use them.
    pub fn new(object: &mut LoadedObject) -> Result<Self, Error> {
        let barrier = Self {
            barrier: object.handle("barrier")?,
            nothing: object.handle("nothing")?,
            begun: AtomicU64::new(0),
            ended: AtomicU64::new(0),
        };
        let states = object.handle("barrier_states")?;
        let program = object.program("barrier_run")?;
        match outlasts(&program, &states, || barrier.wait_for_runs())? {
            true => Ok(barrier),
            false => Err(Error::NoBarrier),
        }
    }

    /// Waits until every program run that has begun before has ended. An update of a map of maps waits for them
    /// (`maybe_wait_bpf_programs` in the kernel).
    pub fn wait_for_runs(&self) -> Result<(), Error> {
        // The number of the wait is taken before the wait begins, so that moments taken during the wait are not covered
        // by it.
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let fd = self.nothing.as_fd().as_raw_fd();
        write(&self.barrier, "barrier", &0u32.to_ne_bytes(), &fd.to_ne_bytes())?;
        self.ended.fetch_max(number, Ordering::SeqCst);
        Ok(())
    }

    /// Returns the present point in time. Everything that the calling thread has written is before it.
    pub fn now(&self) -> Moment {
        // The fence orders the caller's earlier writes before the load, so a wait that begins later covers them.
        fence(Ordering::SeqCst);
        Moment(self.begun.load(Ordering::SeqCst) + 1)
    }

    /// Reports whether every program run that had begun before `moment` is known to have ended, from waits of any
    /// thread.
    pub fn is_over(&self, moment: Moment) -> bool {
        self.ended.load(Ordering::SeqCst) >= moment.0
    }

    /// Waits until the program runs that had begun before `moment` have ended. Returns at once if an earlier wait has
    /// covered them.
    pub fn wait_since(&self, moment: Moment) -> Result<(), Error> {
        if self.is_over(moment) { Ok(()) } else { self.wait_for_runs() }
    }
}

/// Calls `wait` while a long run of the BPF program barrier_run is in progress, and reports whether the run had ended
/// when `wait` returned. Returns true, too, if the run had ended before `wait` was called.
fn outlasts(
    program: &ProgramMut<'_>,
    states: &MapHandle,
    wait: impl FnOnce() -> Result<(), Error> + Send,
) -> Result<bool, Error> {
    const KEY: [u8; 4] = [0; 4];
    let what = "barrier_states";
    let state = || -> Result<u32, Error> {
        let value = states.lookup(&KEY, MapFlags::ANY).map_err(|source| Error::Read { what, source })?;
        Ok(value.and_then(|value| Some(u32::from_ne_bytes(*value.first_chunk()?))).unwrap_or(0))
    };
    write(states, what, &KEY, &0u32.to_ne_bytes())?;
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            while state()? < RUNS && !over.load(Ordering::Acquire) {
                std::hint::spin_loop();
            }
            wait()?;
            Ok(state()? == HAS_RUN)
        });
        let input = ProgramInput { data_in: Some(&FRAME), ..ProgramInput::default() };
        let run = program.test_run(input);
        over.store(true, Ordering::Release);
        let outlasted = waiting.join().unwrap_or(Err(Error::NoBarrier));
        run.map_err(|error| Error::Run { program: "barrier_run", source: io::Error::other(error) })?;
        outlasted
    })
}

#[cfg(test)]
mod tests {
    use millrace_testkit::wait_for;

    use super::*;
    use crate::object::embedded;

    #[test]
    fn one_rcu_grace_period_covers_all_earlier_changes() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP one_rcu_grace_period_covers_all_earlier_changes: needs root");
            return;
        }
        let mut object = embedded!("kernel_test.bpf.o").open().expect("open").load().expect("loaded");
        let barrier = Barrier::new(&mut object).expect("the kernel waits");
        let before = [barrier.now(), barrier.now()];
        assert!(before.iter().all(|moment| !barrier.is_over(*moment)));
        let waits = || barrier.begun.load(Ordering::SeqCst);
        let count = waits();
        before.iter().for_each(|moment| barrier.wait_since(*moment).expect("a wait"));
        assert_eq!(waits(), count + 1, "the second moment has nothing left to wait for");
        assert!(before.iter().all(|moment| barrier.is_over(*moment)));
        assert!(!barrier.is_over(barrier.now()));
    }

    /// Checks that the kernel's barrier passes the test under load, and that a function that does not wait fails it.
    #[test]
    fn kernel_function_that_does_not_wait_is_refused_as_rcu_barrier() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP kernel_function_that_does_not_wait_is_refused_as_rcu_barrier: needs root");
            return;
        }
        let mut object = embedded!("kernel_test.bpf.o").open().expect("open").load().expect("loaded");
        for _ in 0..20 {
            Barrier::new(&mut object).expect("the kernel waits");
        }
        if std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1) {
            println!(
                "one processor: no thread can read the state while a program runs, so the second half is left out"
            );
            return;
        }
        let states = object.handle("barrier_states").expect("a map");
        let program = object.program("barrier_run").expect("a program");
        wait_for("what does not wait to be found out", || {
            !outlasts(&program, &states, || Ok(())).expect("a run")
        });
    }
}
