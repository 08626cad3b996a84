//! Waits until runs of a program have ended; see `bpf/barrier.h`.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use libbpf_rs::{MapCore, MapFlags, MapHandle, ProgramInput, ProgramMut};

use crate::Error;
use crate::intf::generated::{BARRIER_HAS_RUN as HAS_RUN, BARRIER_RUNS as RUNS};
use crate::object::{LoadedObject, write};

/// An Ethernet header, the packet that a program at TC is run with.
const FRAME: [u8; 14] = [0; 14];

/// Waits for the runs of programs; shared by all threads of a process.
///
/// A thread unlinks something, takes [`Self::now`], and may reuse it once [`Self::is_over`] that moment, or after [`Self::wait_since`] it. Waits
/// are numbered when they begin. A wait that ends covers all moments up to its number, so many threads share one wait of some 10 ms.
pub struct Barrier {
    barrier: MapHandle,
    nothing: MapHandle,
    /// Number of waits that have begun.
    begun: AtomicU64,
    /// Number of the latest wait that has ended.
    ended: AtomicU64,
}

/// A point in time, identified by the first wait that begins after it.
#[derive(Clone, Copy, Debug)]
pub struct Moment(u64);

impl Barrier {
    /// Opens the barrier.
    ///
    /// # Errors
    /// The kernel does not wait as it should: keys would be reused while they are in use.
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

    /// Returns when every run of a program that had begun before has ended: an update of a map of maps waits for them
    /// (`maybe_wait_bpf_programs` in the kernel).
    pub fn wait_for_runs(&self) -> Result<(), Error> {
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let fd = self.nothing.as_fd().as_raw_fd();
        write(&self.barrier, "barrier", &0u32.to_ne_bytes(), &fd.to_ne_bytes())?;
        self.ended.fetch_max(number, Ordering::SeqCst);
        Ok(())
    }

    /// Returns the present point in time. Everything that the calling thread has written is before it.
    pub fn now(&self) -> Moment {
        fence(Ordering::SeqCst);
        Moment(self.begun.load(Ordering::SeqCst) + 1)
    }

    /// Returns whether every run that had begun before `moment` has ended, because some later wait covered it.
    pub fn is_over(&self, moment: Moment) -> bool {
        self.ended.load(Ordering::SeqCst) >= moment.0
    }

    /// Waits for the runs that had begun before `moment`, unless a later wait has covered them.
    pub fn wait_since(&self, moment: Moment) -> Result<(), Error> {
        if self.is_over(moment) { Ok(()) } else { self.wait_for_runs() }
    }
}

/// Calls `wait` while a long run is in progress, and returns whether the run had ended when `wait` returned. If no
/// thread saw the run in progress, it counts as ended.
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
    fn one_grace_period_covers_all_earlier_changes() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP one_grace_period_covers_all_earlier_changes: needs root");
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

    /// The kernel's own barrier passes the test under any load, and a function that does not wait fails it.
    #[test]
    fn function_that_does_not_wait_fails_as_barrier() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP function_that_does_not_wait_fails_as_barrier: needs root");
            return;
        }
        let mut object = embedded!("kernel_test.bpf.o").open().expect("open").load().expect("loaded");
        for _ in 0..20 {
            Barrier::new(&mut object).expect("the kernel waits");
        }
        if std::thread::available_parallelism().is_ok_and(|processors| processors.get() == 1) {
            println!("one processor: nobody can look while a program runs");
            return;
        }
        let states = object.handle("barrier_states").expect("a map");
        let program = object.program("barrier_run").expect("a program");
        wait_for("what does not wait to be found out", || {
            !outlasts(&program, &states, || Ok(())).expect("a run")
        });
    }
}
