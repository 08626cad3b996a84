//! Waiting for program runs; see `bpf/barrier.h`.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};

use libbpf_rs::{MapCore, MapFlags, MapHandle, ProgramInput, ProgramMut};

use crate::Error;
use crate::intf::generated::{BARRIER_HAS_RUN as HAS_RUN, BARRIER_RUNS as RUNS};
use crate::object::{Loaded, write};

/// What a program at TC is run with: an Ethernet header.
const FRAME: [u8; 14] = [0; 14];

pub struct Barrier {
    barrier: MapHandle,
    nothing: MapHandle,
    /// Waits so far.
    begun: AtomicU64,
    /// The last of them that is over.
    ended: AtomicU64,
}

/// A moment, told by the first wait that begins after it.
#[derive(Clone, Copy, Debug)]
pub struct Moment(u64);

impl Barrier {
    /// # Errors
    /// Also where the kernel does not wait as it should: keys would be reused while they are in use.
    pub fn new(object: &mut Loaded) -> Result<Self, Error> {
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

    /// Returns when every run of a program has ended that had begun before: an update of a map of maps waits for them
    /// (`maybe_wait_bpf_programs` in the kernel).
    pub fn wait_for_runs(&self) -> Result<(), Error> {
        let number = self.begun.fetch_add(1, Ordering::SeqCst) + 1;
        let fd = self.nothing.as_fd().as_raw_fd();
        write(&self.barrier, "barrier", &0u32.to_ne_bytes(), &fd.to_ne_bytes())?;
        self.ended.fetch_max(number, Ordering::SeqCst);
        Ok(())
    }

    /// Returns this moment, behind all that the calling thread has written.
    pub fn now(&self) -> Moment {
        fence(Ordering::SeqCst);
        Moment(self.begun.load(Ordering::SeqCst) + 1)
    }

    /// Returns whether every run has ended that had begun before: some wait since was for them.
    pub fn is_over(&self, moment: Moment) -> bool {
        self.ended.load(Ordering::SeqCst) >= moment.0
    }

    /// Waits for the runs that had begun before, unless somebody has done so since.
    pub fn wait_since(&self, moment: Moment) -> Result<(), Error> {
        if self.is_over(moment) { Ok(()) } else { self.wait_for_runs() }
    }
}

/// Calls `wait` while a long run is under way, and tells whether the run had ended when that returned. It cannot be told
/// where nobody got to look while it ran; then it had ended, too.
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
    fn one_wait_serves_all_moments_before_it() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP one_wait_serves_all_moments_before_it: needs root");
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

    /// The kernel's own barrier passes, whatever else runs; what does not wait is found out.
    #[test]
    fn what_does_not_wait_for_runs_is_no_barrier() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP what_does_not_wait_for_runs_is_no_barrier: needs root");
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
