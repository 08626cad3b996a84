//! A macro for enumerations of what a BPF program did with a packet, with the same names as in the program.

/// Defines an enumeration with the same order and names as one in a BPF program.
#[macro_export]
macro_rules! outcomes {
    ($(#[$meta:meta])* $kind:ident { $($(#[$doc:meta])* $variant:ident = $name:literal),* $(,)? }) => {
        $(#[$meta])*
        #[allow(missing_docs, reason = "variants whose names say everything have no more")]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum $kind { $($(#[$doc])* $variant),* }

        impl $kind {
            /// All values of the enumeration, in the BPF program's order.
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// Returns the name of this value in status and metrics.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }
        }
    };
}
