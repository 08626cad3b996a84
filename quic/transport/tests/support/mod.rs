//! What several tests of endpoints share.

use std::sync::Arc;

use rustls::{crypto::ring::sign::any_supported_type, sign::CertifiedKey};

/// Makes a self-signed certificate for `localhost`.
pub fn certificate() -> Arc<CertifiedKey> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = any_supported_type(&made.signing_key.serialize_der().try_into().unwrap()).unwrap();
    Arc::new(CertifiedKey::new(vec![made.cert.der().clone()], key))
}
