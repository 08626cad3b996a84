//! What becomes of packets at joints.

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $text:literal),* $(,)?) => {
        /// What became of a packet of a session at a joint, as `bpf/graft_packet.h` has it.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Reason { $($(#[$doc])* $name),* }

        impl Reason {
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// As status and the documentation call it.
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => $text),* }
            }
        }
    };
}

reasons! {
    /// Of no session: none of our business.
    Other = "other",
    /// Went out with its frame.
    Sent = "sent",
    /// Went out, and was a function's own: a request, or sent again.
    SentByUs = "sent-by-us",
    /// XDP let it in.
    LetIn = "let-in",
    /// The application gets it, without its frame.
    Delivered = "delivered",
    /// The same, and it was made out of a parity packet.
    Recovered = "recovered",
    /// A parity packet, behind those that it protects.
    Protected = "protected",
    /// A function of the list was not there: it went on with framing only.
    NoFunction = "no-function",
    /// A request that became the packet that it asked for.
    Resent = "resent",
    /// A request for what is not there any more, or a word between both ends.
    Answered = "answered",
    /// No frame of this version.
    Malformed = "malformed",
    /// A frame that was not made with the session's key.
    Forged = "forged",
    /// Of an epoch that is over, or of another list of functions.
    Stale = "stale",
    /// Came before.
    Duplicate = "duplicate",
    /// Too old to know whether it came before.
    Old = "old",
    /// Behind one that was sent later.
    Late = "late",
    /// With its frame, it is too long for the interface.
    TooLong = "too-long",
    /// Several datagrams in one buffer.
    Merged = "merged",
    /// The kernel had no memory.
    NoRoom = "no-room",
    /// Of a sealed session whose ends have agreed on no keys yet.
    NoKeys = "no-keys",
    /// Sealed with another key, or changed on the way.
    Unopened = "unopened",
    /// Came sealed before, or too old to know whether it did.
    Replayed = "replayed",
    /// May be of a sealed session, but is in fragments or behind headers that are not followed.
    Fragment = "fragment",
    /// Not sent: as much is under way as may be.
    WindowFull = "window-full",
    /// Behind one that is missing, where order is full.
    OutOfTurn = "out-of-turn",
    /// Not sent: the session was about to begin anew.
    Paused = "paused",
    /// Not sent: as much waits for its turn as may.
    TooFast = "too-fast",
    /// The application's socket has no room: it has not come, and is asked for again.
    SocketFull = "socket-full",
    /// Came by UDP where the session has protocol 253, or by that where it has UDP.
    OtherProtocol = "other-protocol",
    /// Not sent: of a session that has paths, and its path is not there.
    NoPath = "no-path",
}
