//! A BPF program that triggers itself, to test that skipped runs of a program are noticed.

use std::io;
use std::os::fd::OwnedFd;

use libbpf_rs::{Link, ProgramInput};
use millrace_kernel::Error;
use millrace_kernel::object::{LoadedObject, embedded};

/// The attached BPF program that triggers itself. Dropping this value detaches the program.
pub struct Recursion {
    object: LoadedObject,
    _link: Link,
}

impl Recursion {
    /// Loads the program, and attaches it to a tracepoint that it triggers itself.
    pub fn attach() -> Result<Self, Error> {
        const TRACEPOINT: &str = "bpf_trace_printk";
        let object = embedded!("recursion.bpf.o").open()?.load()?;
        let link = object.program("recursion_again")?.attach_trace();
        let link = link.map_err(|source| Error::Tracepoint { tracepoint: TRACEPOINT, source })?;
        Ok(Self { object, _link: link })
    }

    /// Runs the program, which triggers a nested run of itself. The kernel skips the nested run.
    pub fn run(&self) -> Result<(), Error> {
        let ran = self.object.program("recursion_run")?.test_run(ProgramInput::default());
        ran.map(drop)
            .map_err(|error| Error::Run { program: "recursion_run", source: io::Error::other(error) })
    }

    /// Returns a descriptor of the program whose nested runs the kernel skips.
    pub fn program_fd(&self) -> io::Result<OwnedFd> {
        let fds = self.object.program_fds()?;
        fds.into_iter().next().ok_or_else(|| io::ErrorKind::NotFound.into())
    }
}
