//! Keys of a run, or of nodes on several hosts: an authority of its own, and a certificate for each node.

use anyhow::{Context, Result, anyhow, ensure};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use std::{
    fs::{self, OpenOptions},
    io::Write,
    os::unix::fs::{MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use vnuma_dsm_transport::{Identity, node_name};

const AUTHORITY: &str = "authority.der";

fn files(directory: &Path, node: u8) -> [PathBuf; 2] {
    ["certificate", "key"].map(|what| directory.join(format!("node-{node}.{what}.der")))
}

/// Writes the keys of all nodes into a directory that only this user can read. The authority's own key is not kept.
pub fn make(directory: &Path, nodes: u8) -> Result<()> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let issuer = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    write(&directory.join(AUTHORITY), issuer.der())?;
    for node in 0..nodes {
        let key = KeyPair::generate()?;
        let certificate = CertificateParams::new(vec![node_name(node)])?.signed_by(&key, &issuer)?;
        let [certificate_file, key_file] = files(directory, node);
        write(&certificate_file, certificate.der())?;
        write(&key_file, &key.serialize_der())?;
    }
    Ok(())
}

fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    file.and_then(|mut file| file.write_all(bytes)).with_context(|| path.display().to_string())
}

/// A node's own key, and whom it believes.
pub fn read(directory: &Path, node: u8) -> Result<Identity> {
    let bytes = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
    let [certificate, key] = files(directory, node);
    let mode = fs::metadata(&key).with_context(|| key.display().to_string())?.mode();
    ensure!(mode & 0o077 == 0, "{}: mode {:o}: others may use it; chmod 600", key.display(), mode & 0o777);
    let authority = CertificateDer::from(bytes(&directory.join(AUTHORITY))?);
    let certificate = CertificateDer::from(bytes(&certificate)?);
    let key = PrivatePkcs8KeyDer::from(bytes(&key)?).into();
    Identity::new(&[authority], vec![certificate], key)
        .map_err(|error| anyhow!("the key of node {node}: {error}"))
}
