//! Outcomes of packets, by a program's names.

/// An enumeration that has the order of one of the program's, and its names.
#[macro_export]
macro_rules! outcomes {
    ($(#[$meta:meta])* $kind:ident { $($(#[$doc:meta])* $variant:ident = $name:literal),* $(,)? }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum $kind { $($(#[$doc])* $variant),* }

        impl $kind {
            pub const ALL: [Self; [$($name),*].len()] = [$(Self::$variant),*];

            /// Returns its name in metrics: lower case, with underscores.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }
        }
    };
}
