//! Attaches the BPF programs that time softirqs and socket calls. Trial calls check that each system call and request
//! (AIO, io_uring) that sends or receives is counted.

use std::io;
use std::sync::atomic::Ordering;

use millrace_kernel::Error;

use super::config::{KernelEvent, TimingMethod};
use super::sockets::{self, SocketPair};
use super::ways::{SocketCall, WAYS};
use super::{CostPrograms, load};

/// A system call or request (AIO, io_uring) that sends or receives, but is not timed on this kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingPoint {
    /// The kind of kernel work, such as `Send`, whose measured time does not include this system call or request.
    pub event: KernelEvent,
    /// Name of the system call, or of the AIO or io_uring request.
    pub what: &'static str,
    /// The reason why this system call or request is not timed.
    pub reason: String,
}

impl CostPrograms {
    /// Attaches the BPF programs that time softirqs and socket calls. Makes a trial call of each system call and
    /// request (AIO, io_uring) that sends or receives, and returns those that were not counted.
    pub fn attach(&mut self) -> Result<Vec<MissingPoint>, Error> {
        self.forget_the_past();
        for (tracepoint, program) in self.tracepoints.iter().copied() {
            let link = self.object.program(program)?.attach_trace();
            self.probes.push(link.map_err(|source| Error::Tracepoint { tracepoint, source })?);
        }
        let sockets =
            SocketPair::new().map_err(|source| Error::Prepare { what: "a pair of sockets", source })?;
        let missing = WAYS.iter().filter_map(|way| {
            let reason = self.attach_way(way, &sockets).err()?;
            Some(MissingPoint { event: way.event, what: way.name, reason })
        });
        Ok(missing.collect())
    }

    /// Detaches the BPF programs that time softirqs and socket calls. The sums of times keep their values and grow
    /// further after the next [`attach`](Self::attach).
    pub fn detach(&mut self) {
        // Last in, first out: the program at the start of a softirq or call is detached before that at its end. So no
        // timing begins that would never end.
        while let Some(link) = self.probes.pop() {
            drop(link);
        }
        self.attached.clear();
    }

    /// Discards the timing of softirqs and calls that were running when the programs were detached, since their ends
    /// were not traced. Discards time that was not yet added to the sums of a process.
    fn forget_the_past(&self) {
        for cpu in self.all_cpus() {
            cpu.epoch.fetch_add(1, Ordering::Relaxed);
            [&cpu.task, &cpu.softirq, &cpu.base].iter().for_each(|word| word.store(0, Ordering::Relaxed));
            // Time that was not yet added to the sums of a process must not be added to those of the next process.
            let charged = cpu.seen_ns.iter().zip(&cpu.ns).chain(cpu.seen_calls.iter().zip(&cpu.calls));
            charged.for_each(|(seen, sum)| seen.store(load(sum), Ordering::Relaxed));
        }
    }

    /// Attaches to one candidate function after another until a trial call of this system call or request is counted
    /// exactly once.
    fn attach_way(&mut self, way: &SocketCall, sockets: &SocketPair) -> Result<(), String> {
        if self.method == Some(TimingMethod::SystemCalls) {
            return match way.beyond_system_calls() {
                Some(reason) => Err(reason.to_owned()),
                None => self.prove(way, sockets),
            };
        }
        let mut reason = String::from("this kernel has no function of the call that BPF can attach to");
        for function in way.functions {
            let Some(number) = self.points.iter().position(|point| point.function == *function) else {
                continue;
            };
            match self.attach_point(number).and_then(|()| self.prove(way, sockets)) {
                Ok(()) => return Ok(()),
                Err(error) => reason = error,
            }
        }
        Err(reason)
    }

    fn prove(&self, way: &SocketCall, sockets: &SocketPair) -> Result<(), String> {
        match self.counted(way, sockets) {
            Ok(1) => Ok(()),
            Ok(0) => Err("a trial call was not counted".to_owned()),
            Ok(calls) => Err(format!("one trial call was counted {calls} times")),
            Err(error) => Err(format!("a trial call failed: {error}")),
        }
    }

    /// Attaches the programs for the function's entry and exit. They stay attached even if the present trial call does
    /// not use the function, since other calls may.
    fn attach_point(&mut self, number: usize) -> Result<(), String> {
        let Some(point) = self.points.get(number).copied() else { return Err(String::new()) };
        if let Some(known) = self.attached.get(point.function) {
            return known.clone();
        }
        // Attach the program at the function's exit first: without it, the timing of a call would never end.
        let done = ["cost_end", "cost_begin"].into_iter().try_for_each(|program| {
            let link = self.object.program_by_name(&format!("{program}_{number}"))?.attach_trace();
            self.probes.push(link.map_err(|source| Error::Function { function: point.function, source })?);
            Ok(())
        });
        let done = done.map_err(|error: Error| error.to_string());
        self.attached.insert(point.function, done.clone());
        done
    }

    /// Makes a trial call of `way` (a system call or request), and returns how often the programs counted it. Programs
    /// count only this thread's calls in `checked`, so other load does not disturb the trial.
    fn counted(&self, way: &SocketCall, sockets: &SocketPair) -> io::Result<u64> {
        let event = way.event as usize;
        let thread = u64::from(sockets::thread_id());
        let checked =
            || -> u64 { self.all_cpus().filter_map(|cpu| Some(load(cpu.checked.get(event)?))).sum() };
        let before = checked();
        self.all_cpus().for_each(|cpu| cpu.check_tid.store(thread, Ordering::Relaxed));
        let done = sockets.call(way);
        self.all_cpus().for_each(|cpu| cpu.check_tid.store(0, Ordering::Relaxed));
        done.map(|()| checked() - before)
    }

    /// Returns the names of the functions at which calls are timed.
    pub fn functions(&self) -> Vec<&'static str> {
        let mut functions: Vec<_> =
            self.attached.iter().filter(|(_, done)| done.is_ok()).map(|(function, _)| *function).collect();
        functions.sort_unstable();
        functions
    }
}
