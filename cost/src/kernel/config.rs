//! What is observed, and how.

/// `enum cost_event`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Event {
    NetRx = 1,
    NetTx = 2,
    Send = 3,
    Receive = 4,
    IoUring = 5,
}

impl Event {
    pub const ALL: [Self; 5] = [Self::NetRx, Self::NetTx, Self::Send, Self::Receive, Self::IoUring];

    pub(super) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|event| *event as u8 == code)
    }
}

/// Where calls that send or receive are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// At the kernel's functions, all callers included.
    Functions,
    /// At system calls and io_uring requests: costs a little in every system call of the machine, and does not see
    /// the kernel's own sockets. For kernels that allow no programs on functions.
    SystemCalls,
}

/// How stacks come to userspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Transport {
    /// A double buffer per CPU in shared memory.
    #[default]
    DoubleBuffer,
    /// One BPF ring buffer for all CPUs.
    RingBuffer,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Time events, once [attached](super::Cost::attach), and sample inside them. Otherwise nothing but the sampler is loaded, and
    /// it samples always.
    pub events: bool,
    /// `None` takes functions where the kernel lets it.
    pub method: Option<Method>,
    pub transport: Transport,
    /// Room for stacks per CPU between two calls of [`Cost::drain`](super::Cost::drain). A stack of 40 functions takes 336 bytes.
    pub buffer_bytes: u32,
    /// Whether processes may be [watched](super::Cost::watch).
    pub watch: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            events: true,
            method: None,
            transport: Transport::default(),
            buffer_bytes: 1 << 18,
            watch: false,
        }
    }
}
