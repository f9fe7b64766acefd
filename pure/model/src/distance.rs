//! SLIT distances between nodes.

use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Distance of a node to itself (ACPI 6.5, section 5.2.17).
pub const LOCAL_DISTANCE: u8 = 10;

/// A square matrix of distances, row = from, column = to, by position (not by node number). Each publication has a copy, which
/// shares the rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<Vec<u8>>", into = "Vec<Vec<u8>>")]
pub struct DistanceMatrix {
    rows: Arc<[Vec<u8>]>,
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
        Ok(Self { rows: rows.into() })
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
        matrix.rows.to_vec()
    }
}

#[cfg(feature = "schema")]
impl utoipa::PartialSchema for DistanceMatrix {
    fn schema() -> utoipa::openapi::RefOr<utoipa::openapi::schema::Schema> {
        // As it is serialized.
        Vec::<Vec<u8>>::schema()
    }
}

#[cfg(feature = "schema")]
impl utoipa::ToSchema for DistanceMatrix {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn rows_are_from_and_columns_to() {
        let matrix = DistanceMatrix::new(vec![vec![10, 21], vec![31, 10]]).unwrap();
        assert_eq!((matrix.get(0, 1), matrix.get(1, 0)), (Some(21), Some(31)));
        assert_eq!((matrix.get(2, 0), matrix.get(0, 2)), (None, None));
        assert_eq!(matrix.len(), 2);
        assert!(DistanceMatrix::default().is_empty());
    }

    #[test]
    fn odd_shapes_and_values_are_named() {
        assert_eq!(
            DistanceMatrix::new(vec![vec![10, 20], vec![20]]),
            Err(DistanceError::NotSquare { row: 1, found: 1, expected: 2 })
        );
        let error = DistanceMatrix::new(vec![vec![10, 20], vec![9, 10]]).unwrap_err();
        assert_eq!(error, DistanceError::TooSmall { row: 1, column: 0, value: 9 });
        assert_eq!(error.to_string(), "distance 9 from 1 to 0 is below 10, the local distance");
        assert!(serde_json::from_str::<DistanceMatrix>("[[10,20]]").is_err());
    }

    proptest! {
        #[test]
        fn accepted_exactly_when_square_and_large_enough(
            rows in proptest::collection::vec(proptest::collection::vec(8u8.., 0..4), 0..4),
        ) {
            let square = rows.iter().all(|row| row.len() == rows.len());
            let large = rows.iter().flatten().all(|&value| value >= LOCAL_DISTANCE);
            let matrix = DistanceMatrix::new(rows.clone());
            prop_assert_eq!(matrix.is_ok(), square && large);
            if let Ok(matrix) = matrix {
                prop_assert_eq!(Vec::<Vec<u8>>::from(matrix), rows);
            }
        }
    }
}
