//! SLIT distances between nodes.

use serde::{Deserialize, Serialize};

/// Distance of a node to itself (ACPI 6.5, section 5.2.17).
pub const LOCAL_DISTANCE: u8 = 10;

/// A square matrix of distances, row = from, column = to, by position (not by node number).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Vec<u8>>", into = "Vec<Vec<u8>>")]
pub struct DistanceMatrix {
    rows: Vec<Vec<u8>>,
}

/// Why rows are no distance matrix.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum DistanceError {
    /// A row has another length than the number of rows.
    #[error("row {row} has {found} distances, expected {expected}")]
    NotSquare {
        /// Position of the row.
        row: usize,
        /// Entries in it.
        found: usize,
        /// Number of rows.
        expected: usize,
    },
    /// The SLIT reserves values below 10.
    #[error("distance {value} from {row} to {column} is below 10, the local distance")]
    TooSmall {
        /// From.
        row: usize,
        /// To.
        column: usize,
        /// What was found.
        value: u8,
    },
}

impl DistanceMatrix {
    /// Checks the shape and the values.
    pub fn new(rows: Vec<Vec<u8>>) -> Result<Self, DistanceError> {
        let expected = rows.len();
        for (row, values) in rows.iter().enumerate() {
            if values.len() != expected {
                return Err(DistanceError::NotSquare { row, found: values.len(), expected });
            }
            if let Some(column) = values.iter().position(|&value| value < LOCAL_DISTANCE) {
                return Err(DistanceError::TooSmall { row, column, value: values[column] });
            }
        }
        Ok(Self { rows })
    }
    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.rows.len()
    }
    /// Has it no node?
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }
    /// Distance by position.
    pub fn get(&self, from: usize, to: usize) -> Option<u8> {
        self.rows.get(from)?.get(to).copied()
    }
    /// Rows, for display.
    pub fn rows(&self) -> &[Vec<u8>] {
        &self.rows
    }
}

impl TryFrom<Vec<Vec<u8>>> for DistanceMatrix {
    type Error = DistanceError;
    fn try_from(rows: Vec<Vec<u8>>) -> Result<Self, DistanceError> {
        Self::new(rows)
    }
}

impl From<DistanceMatrix> for Vec<Vec<u8>> {
    fn from(matrix: DistanceMatrix) -> Self {
        matrix.rows
    }
}
