//! The settings with which the BPF programs of the CPU time observer are loaded.

/// A kind of kernel work that BPF programs time, with the values of `enum cost_event`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum KernelEvent {
    /// The NET_RX softirq.
    NetRx = 1,
    /// The NET_TX softirq.
    NetTx = 2,
    /// Calls that send on a socket.
    Send = 3,
    /// Calls that receive from a socket.
    Receive = 4,
    /// io_uring's own threads, outside of socket calls.
    IoUring = 5,
    /// Calls that send or receive on AF_UNIX and netlink sockets.
    Local = 6,
}

impl KernelEvent {
    /// All kinds of timed kernel work, in the order of their numbers in `enum cost_event`.
    pub const ALL: [Self; 6] =
        [Self::NetRx, Self::NetTx, Self::Send, Self::Receive, Self::IoUring, Self::Local];

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|event| *event as u8 == code)
    }
}

/// The method of timing calls that send or receive: programs on kernel functions, or on system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimingMethod {
    /// Programs are attached to kernel functions. They time system calls, io_uring requests and the kernel's own calls.
    Functions,
    /// Programs are attached to system calls and io_uring requests, for kernels that allow no programs on functions.
    /// Every system call of the machine gets a little slower, and calls on the kernel's own sockets are not timed.
    SystemCalls,
}

/// The buffer through which stacks reach userspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StackTransport {
    /// A double buffer per CPU in shared memory.
    #[default]
    DoubleBuffer,
    /// One BPF ring buffer for all CPUs.
    RingBuffer,
}

/// The programs to load, and the buffers that they use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Whether to load the BPF programs that time softirqs and socket calls, which
    /// [`attach`](super::CostPrograms::attach) starts. Otherwise only the sampler is loaded.
    pub events: bool,
    /// Whether calls are timed at kernel functions or at system calls. `None` chooses functions if the kernel allows
    /// it, or else system calls.
    pub method: Option<TimingMethod>,
    /// The buffer through which stacks reach userspace.
    pub transport: StackTransport,
    /// Size in bytes of each CPU's buffer for the stacks between two calls of
    /// [`CostPrograms::drain`](super::CostPrograms::drain). A stack of 40 functions takes 360 bytes.
    pub buffer_bytes: u32,
    /// Whether processes may be [watched](super::CostPrograms::watch), which samples their user-mode stacks too.
    pub watch: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            events: true,
            method: None,
            transport: StackTransport::default(),
            buffer_bytes: 1 << 18,
            watch: false,
        }
    }
}
