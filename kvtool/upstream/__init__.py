"""Download upstream's trees and trained models, and check them against upstream.lock and models.toml."""
