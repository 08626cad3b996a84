//! Mirrors of `bpf/intf.h`. The test compares them with the BTF of the compiled objects.

#![allow(unsafe_code)]

/// Plain data: every bit pattern is a value and there are no padding bytes.
///
/// # Safety
/// Only for `repr(C)` structures of integers and integer arrays without implicit padding.
pub(crate) unsafe trait Plain: Copy {
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != size_of::<Self>() {
            return None;
        }
        // SAFETY: the length was checked, any bytes are a valid `Self`, and the read may be unaligned.
        Some(unsafe { bytes.as_ptr().cast::<Self>().read_unaligned() })
    }

    fn as_bytes(&self) -> &[u8] {
        // SAFETY: `self` is `size_of::<Self>()` initialised bytes, none of them padding.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast(), size_of::<Self>()) }
    }
}

// SAFETY: an integer.
unsafe impl Plain for u64 {}

macro_rules! mirror {
    ($(#[$meta:meta])* $rust:ident = $c:literal { $($field:ident: $type:ty),* $(,)? }) => {
        $(#[$meta])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
        pub(crate) struct $rust { $(pub $field: $type),* }

        // SAFETY: `repr(C)`, integers only; the layout test finds padding.
        #[allow(unsafe_code)]
        unsafe impl $crate::intf::Plain for $rust {}

        #[cfg(test)]
        impl $rust {
            pub(crate) const LAYOUT: $crate::intf::Layout = $crate::intf::Layout {
                name: $c,
                size: size_of::<$rust>(),
                fields: &[$((stringify!($field), std::mem::offset_of!($rust, $field), size_of::<$type>())),*],
            };
        }
    };
}

pub(crate) use mirror;

/// A structure that lives in memory shared with the kernel.
macro_rules! shared {
    ($rust:ident = $c:literal { $($field:ident: $type:ty),* $(,)? }) => {
        #[repr(C)]
        pub(crate) struct $rust { $(pub $field: $type),* }

        #[cfg(test)]
        impl $rust {
            pub(crate) const LAYOUT: crate::intf::Layout = crate::intf::Layout {
                name: $c,
                size: size_of::<$rust>(),
                fields: &[$((stringify!($field), std::mem::offset_of!($rust, $field), size_of::<$type>())),*],
            };
        }
    };
}

pub(crate) use shared;

mirror!(ProbeConfig = "probe_config" { min_payload_bytes: u32 });

mirror!(ProbeSample = "probe_sample" {
    time_ns: u64,
    ifindex: u32,
    payload_bytes: u32,
    segment_bytes: u32,
    source_port: [u8; 2],
    destination_port: [u8; 2],
    vlan: u16,
    direction: u8,
    family: u8,
    source: [u8; 16],
    destination: [u8; 16],
    pad: u32,
});

mirror!(SyscallsConfig = "syscalls_config" { tgid: u32 });

mirror!(SoftirqsConfig = "softirqs_config" { tgid: u32 });

#[cfg(test)]
pub(crate) struct Layout {
    pub name: &'static str,
    pub size: usize,
    pub fields: &'static [(&'static str, usize, usize)],
}

#[cfg(test)]
pub(crate) use tests::{assert_layouts, enum_names};

#[cfg(test)]
mod tests {
    use super::*;
    use libbpf_rs::HasSize;
    use libbpf_rs::btf::Btf;
    use libbpf_rs::btf::types::{Enum, MemberAttr, Struct};

    #[test]
    fn mirrors_match_btf() {
        assert_layouts("probe.bpf.o", &[ProbeConfig::LAYOUT, ProbeSample::LAYOUT]);
        assert_layouts("syscalls.bpf.o", &[SyscallsConfig::LAYOUT]);
        assert_layouts("softirqs.bpf.o", &[SoftirqsConfig::LAYOUT]);
    }

    pub(crate) fn assert_layouts(object: &str, layouts: &[Layout]) {
        let btf = btf(object);
        for layout in layouts {
            check(&btf, layout);
        }
    }

    /// The names of an enum, in order and in lower case, without `prefix` and the last one, which counts them.
    pub(crate) fn enum_names(object: &str, kind: &str, prefix: &str) -> Vec<String> {
        let btf = btf(object);
        let kind: Enum<'_> = btf.type_by_name(kind).expect("an enum");
        let mut names: Vec<_> = kind
            .iter()
            .map(|member| (member.value, member.name.expect("a name").to_string_lossy().to_lowercase()))
            .collect();
        names.sort_unstable();
        assert!(names.pop().expect("a count").1.ends_with('s'));
        names.into_iter().map(|(_, name)| name.trim_start_matches(prefix).to_owned()).collect()
    }

    fn btf(object: &str) -> Btf<'static> {
        Btf::from_path(format!("{}/{object}", env!("OUT_DIR"))).expect("BTF")
    }

    fn check(btf: &Btf<'_>, layout: &Layout) {
        let c: Struct<'_> = btf.type_by_name(layout.name).unwrap_or_else(|| panic!("no {}", layout.name));
        assert_eq!(c.size(), layout.size, "size of {}", layout.name);
        let offsets: Vec<_> = c
            .iter()
            .map(|member| match member.attr {
                MemberAttr::Normal { offset } => {
                    (member.name.expect("a name").to_string_lossy().into_owned(), offset as usize / 8)
                }
                MemberAttr::BitField { .. } => panic!("bit field in {}", layout.name),
            })
            .collect();
        let mirrored: Vec<_> = layout.fields.iter().map(|(name, at, _)| ((*name).to_owned(), *at)).collect();
        assert_eq!(offsets, mirrored, "fields of {}", layout.name);
        let filled: usize = layout.fields.iter().map(|(_, _, size)| size).sum();
        assert_eq!(filled, layout.size, "implicit padding in {}", layout.name);
    }

    #[test]
    fn bytes_round_trip() {
        let sample = ProbeSample { time_ns: 7, destination_port: [1, 2], pad: 9, ..Default::default() };
        assert_eq!(ProbeSample::from_bytes(sample.as_bytes()), Some(sample));
        assert_eq!(ProbeSample::from_bytes(&sample.as_bytes()[1..]), None);
    }
}
