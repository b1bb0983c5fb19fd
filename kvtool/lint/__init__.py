"""What `kvtool lint` looks at: the series and its files, without applying anything."""
