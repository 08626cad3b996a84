//! The observed CPUs and events, and the method.

/// `enum cost_event`.
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
    /// The events, in the order of their codes.
    pub const ALL: [Self; 6] =
        [Self::NetRx, Self::NetTx, Self::Send, Self::Receive, Self::IoUring, Self::Local];

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|event| *event as u8 == code)
    }
}

/// The places where calls that send or receive are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TimingMethod {
    /// The kernel's functions, which catches all callers.
    Functions,
    /// System calls and io_uring requests. It costs a little in every system call of the machine, and misses the kernel's own sockets. It
    /// serves kernels that allow no programs on functions.
    SystemCalls,
}

/// The way of stacks to userspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum StackTransport {
    /// A double buffer per CPU in shared memory.
    #[default]
    DoubleBuffer,
    /// One BPF ring buffer for all CPUs.
    RingBuffer,
}

/// The programs to load, and how they report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Whether events are timed, once [attached](super::CostPrograms::attach). Otherwise nothing but the sampler is loaded.
    pub events: bool,
    /// `None` takes functions where the kernel lets it.
    pub method: Option<TimingMethod>,
    /// How stacks come to userspace.
    pub transport: StackTransport,
    /// Room for stacks per CPU between two calls of [`CostPrograms::drain`](super::CostPrograms::drain). A stack of 40 functions takes 336 bytes.
    pub buffer_bytes: u32,
    /// Whether processes may be [watched](super::CostPrograms::watch).
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
