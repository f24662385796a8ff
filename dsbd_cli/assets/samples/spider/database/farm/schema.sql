-- Orchards, workers and harvests: written for this project.
CREATE TABLE orchard (orchard_id INTEGER PRIMARY KEY, name TEXT, region TEXT, hectares REAL);
CREATE TABLE worker (worker_id INTEGER PRIMARY KEY, name TEXT, age INTEGER, orchard_id INTEGER, wage REAL,
  FOREIGN KEY (orchard_id) REFERENCES orchard(orchard_id));
CREATE TABLE harvest (harvest_id INTEGER PRIMARY KEY, orchard_id INTEGER, fruit TEXT, year INTEGER, tonnes REAL,
  FOREIGN KEY (orchard_id) REFERENCES orchard(orchard_id));
INSERT INTO orchard VALUES (1,'Hillside','Kent',12.5),(2,'Old Mill','Kent',8.0),(3,'Riverbend','Somerset',20.0),
  (4,'Sunny Patch','Devon',5.5),(5,'Far Acre','Devon',15.0);
INSERT INTO worker VALUES
  (1,'Ada Finch',34,1,14.5),(2,'Bram Kerr',52,1,16.0),(3,'Cora Dean',28,2,13.0),(4,'Dev Patel',41,3,16.0),
  (5,'Ella Stone',23,3,12.5),(6,'Finn Moss',61,3,18.0),(7,'Gwen Hale',28,4,13.5),(8,'Hal Brook',37,NULL,15.0);
INSERT INTO harvest VALUES
  (1,1,'apple',2021,41.0),(2,1,'apple',2022,38.5),(3,1,'pear',2022,12.0),(4,2,'cherry',2021,6.5),(5,2,'cherry',2022,7.2),
  (6,3,'apple',2021,66.0),(7,3,'apple',2022,71.5),(8,3,'plum',2022,15.0),(9,4,'pear',2021,9.8),(10,4,'plum',2022,4.4),
  (11,3,'pear',2021,15.0);
